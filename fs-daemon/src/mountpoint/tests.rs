//! Directories good and bad, and, as root, real FUSE mounts: dead, deaf and alive.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;

use nix::mount::{MsFlags, mount};
use tempfile::TempDir;

use super::*;

struct Place {
    directory: TempDir,
    locks: Vec<PathBuf>,
}

impl Place {
    /// A temporary directory with an empty `mnt` in it.
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("mnt")).unwrap();
        let locks = vec![directory.path().join("locks")];
        Place { directory, locks }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    fn prepare(&self, path: impl AsRef<Path>) -> Result<Mountpoint, Error> {
        Mountpoint::prepare_with(&self.directory.path().join(path), &self.locks)
    }

    fn refused(&self, path: impl AsRef<Path>) -> String {
        let error = self.prepare(path).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        format!("{} ({})", error.message, error.hint.expect("there is always something to do"))
    }
}

impl Drop for Place {
    /// However a test ends, no mount may stay.
    fn drop(&mut self) {
        while umount2(&self.path(), MntFlags::MNT_DETACH).is_ok() {}
    }
}

/// Mounts a FUSE filesystem that nobody serves; as long as the file is open, it is deaf, then dead.
fn deaf(path: &Path, source: &str, kind: &str) -> Option<File> {
    if !geteuid().is_root() {
        println!("skipped: mounting needs root");
        return None;
    }
    let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
        println!("skipped: there is no /dev/fuse");
        return None;
    };
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", device.as_raw_fd());
    match mount(Some(source), path, Some(kind), MsFlags::empty(), Some(options.as_str())) {
        Ok(()) => Some(device),
        Err(Errno::EPERM) => {
            println!("skipped: this root may not mount");
            None
        }
        Err(e) => panic!("mount: {e}"),
    }
}

/// Answers INIT, and everything else with ENOSYS, until unmounted.
fn serve(mut device: File) {
    let mut request = vec![0; 1 << 16];
    while let Ok(length) = device.read(&mut request) {
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
        let (opcode, unique) = (word(4), &request[8..16]);
        assert_eq!(length, word(0) as usize);
        let mut body = Vec::new();
        if opcode == 26 {
            body = vec![0; 64];
            // Version 7.31, and the smallest max_write.
            body[0..4].copy_from_slice(&7u32.to_ne_bytes());
            body[4..8].copy_from_slice(&31u32.to_ne_bytes());
            body[20..24].copy_from_slice(&4096u32.to_ne_bytes());
        }
        let error: i32 = if opcode == 26 { 0 } else { -libc::ENOSYS };
        let mut reply = Vec::new();
        reply.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
        reply.extend_from_slice(&error.to_ne_bytes());
        reply.extend_from_slice(unique);
        reply.extend_from_slice(&body);
        // A request that nobody waits for any more is refused; FORGET wants no answer.
        if opcode != 2 {
            let _ = device.write(&reply);
        }
    }
}

#[test]
fn an_empty_directory_is_taken_until_dropped() {
    let place = Place::new();
    let taken = place.prepare("mnt").unwrap();
    assert_eq!(taken.path(), place.path().canonicalize().unwrap());
    assert!(topmost(taken.path()).unwrap().is_none());
    taken.detach().unwrap();
    let message = place.refused("mnt");
    assert!(message.contains(&format!("by gradfs pid {}", std::process::id())), "{message}");
    drop(taken);
    place.prepare("mnt/").unwrap();
}

#[test]
fn a_link_and_its_target_are_one_mountpoint() {
    let place = Place::new();
    std::os::unix::fs::symlink("mnt", place.directory.path().join("link")).unwrap();
    let taken = place.prepare("link").unwrap();
    assert_eq!(taken.path(), place.path().canonicalize().unwrap());
    assert!(place.refused("mnt/../mnt").contains("gradfs pid"));
}

#[test]
fn only_an_empty_directory_is_a_mountpoint() {
    let place = Place::new();
    fs::write(place.directory.path().join("file"), "x").unwrap();
    assert!(place.refused("missing").contains("does not exist (create it: mkdir -p /"));
    assert!(place.refused("file").contains("is not a directory"));
    assert!(place.refused("file/below").contains("is not a directory"));
    fs::write(place.path().join("precious"), "x").unwrap();
    assert!(place.refused("mnt").contains("is not empty"));
    assert!(place.locks[0].read_dir().unwrap().next().is_none(), "a refusal keeps no lock");
}

#[test]
fn mounts_of_others_are_left_alone() {
    let place = Place::new();
    let error = Mountpoint::prepare_with(Path::new("/proc"), &place.locks).unwrap_err();
    assert!(error.message.contains("/proc is not empty"), "{}", error.message);
    let error = unmount_with(Path::new("/proc"), true, &place.locks).unwrap_err();
    assert!(error.message.contains("not of gradfs"), "{}", error.message);
    let error = unmount_with(&place.path(), false, &place.locks).unwrap_err();
    assert!(error.message.contains("nothing is mounted"), "{}", error.message);
    let Some(device) = deaf(&place.path(), "sshfs", "fuse.sshfs") else { return };
    drop(device);
    assert!(place.refused("mnt").contains("is a dead mount of sshfs"));
}

#[test]
fn an_empty_volume_is_a_mountpoint() {
    let place = Place::new();
    if !geteuid().is_root() {
        return println!("skipped: mounting needs root");
    }
    let (path, none) = (place.path(), None::<&str>);
    mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), none).unwrap();
    // The mounts of a dead daemon on it are cleared away, and the volume stays.
    let Some(device) = deaf(&path, "gradfs", "fuse.gradfs") else { return };
    drop(device);
    let taken = place.prepare("mnt").unwrap();
    assert_eq!(topmost(taken.path()).unwrap().unwrap().kind, "tmpfs");
    taken.detach().unwrap();
    assert!(topmost(taken.path()).unwrap().is_some(), "a volume is not ours to detach");
    drop(taken);
    fs::write(path.join("precious"), "x").unwrap();
    assert!(place.refused("mnt").contains("is not empty"));
}

#[test]
fn dead_mounts_are_cleared_away_however_many() {
    let place = Place::new();
    for (source, kind) in [("gradfs", "fuse"), ("gradfs", "fuse.gradfs"), ("x", "fuse.gradfs")] {
        let Some(device) = deaf(&place.path(), source, kind) else { return };
        drop(device);
    }
    assert_eq!(probe(&place.path()), Probe::Dead);
    let message = place.refused("mnt/below");
    assert!(message.contains("that is dead (unmount that first: gradfs unmount /"), "{message}");
    let taken = place.prepare("mnt").unwrap();
    assert!(topmost(taken.path()).unwrap().is_none());
    assert_eq!(fs::read_dir(taken.path()).unwrap().count(), 0);
}

#[test]
fn a_dead_mount_can_be_unmounted_by_command() {
    let place = Place::new();
    let Some(device) = deaf(&place.path(), "gradfs", "fuse.gradfs") else { return };
    drop(device);
    unmount_with(&place.path(), false, &place.locks).unwrap();
    assert_eq!(mountinfo::topmost(&place.path()).unwrap(), None);
}

#[test]
fn a_deaf_mount_does_not_hang_us() {
    let place = Place::new();
    let Some(device) = deaf(&place.path(), "gradfs", "fuse.gradfs") else { return };
    let start = Instant::now();
    let message = place.refused("mnt");
    assert!(message.contains("does not answer"), "{message}");
    let message = place.refused("mnt/below");
    assert!(message.contains("is inside") && message.contains("does not answer"), "{message}");
    assert!(start.elapsed() < 3 * PATH_TIMEOUT + Duration::from_secs(60));
    unmount_with(&place.path(), true, &place.locks).unwrap();
    assert_eq!(mountinfo::topmost(&place.path()).unwrap(), None);
    drop(device);
}

#[test]
fn a_daemon_that_is_killed_while_we_ask_is_dead() {
    let place = Place::new();
    let Some(device) = deaf(&place.path(), "gradfs", "fuse.gradfs") else { return };
    let killer = thread::spawn(move || {
        thread::sleep(PATH_TIMEOUT / 4);
        drop(device);
    });
    assert_eq!(probe(&place.path()), Probe::Dead);
    killer.join().unwrap();
}

#[test]
fn a_live_mount_is_refused_and_unmounted_by_command_only() {
    let place = Place::new();
    let taken = place.prepare("mnt").unwrap();
    let Some(device) = deaf(&place.path(), "gradfs", "fuse.gradfs") else { return };
    // Ends when unmounted, and gives the lock back, as a daemon does.
    let daemon = thread::spawn(move || {
        serve(device);
        thread::sleep(Duration::from_millis(50));
        drop(taken);
    });
    let message = place.refused("mnt");
    assert!(message.contains("is already mounted by gradfs pid"), "{message}");
    let elsewhere = vec![place.directory.path().join("other-locks")];
    let error = Mountpoint::prepare_with(&place.path(), &elsewhere).unwrap_err();
    assert!(error.message.contains("already mounted by another gradfs"), "{}", error.message);

    unmount_with(&place.path(), false, &place.locks).unwrap();
    assert_eq!(lock::holder(&place.path(), &place.locks), None, "the daemon was waited for");
    daemon.join().unwrap();
    place.prepare("mnt").unwrap();
}
