//! The kernel's table of mounts, read without touching any mount.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The directory it is mounted on.
    pub point: PathBuf,
    /// The number of its device, as the table has it.
    pub device: String,
    /// Type of the filesystem, with its subtype: `ext4`, `fuse.gradfs`.
    pub kind: String,
    /// The source: a device, or the name that a FUSE daemon gave.
    pub source: String,
}

impl Mount {
    /// Whether the mount is one of ours.
    pub fn is_gradfs(&self) -> bool {
        self.kind == "fuse.gradfs" || (self.is_fuse() && self.source == "gradfs")
    }

    /// Whether a FUSE daemon serves the mount.
    pub fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.") || self.kind == "fuseblk"
    }
}

impl fmt::Display for Mount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source == self.kind || self.source == "none" {
            f.write_str(&self.kind)
        } else {
            write!(f, "{} ({})", self.source, self.kind)
        }
    }
}

/// The mount that one sees at `path`, if `path` is a mountpoint.
pub fn topmost(path: &Path) -> io::Result<Option<Mount>> {
    OpenTable::open()?.topmost(path)
}

/// The table, open: it can be read also when the process has no file descriptor left.
#[derive(Debug)]
pub struct OpenTable(File);

impl OpenTable {
    /// Opens it.
    pub fn open() -> io::Result<OpenTable> {
        File::open("/proc/self/mountinfo").map(OpenTable)
    }

    /// Like [`topmost`], from this table.
    pub fn topmost(&self, path: &Path) -> io::Result<Option<Mount>> {
        // The last of several mounts on one directory hides the others.
        Ok(self.read()?.into_iter().rfind(|mount| mount.point == path))
    }

    fn read(&self) -> io::Result<Vec<Mount>> {
        let mut table = Vec::new();
        (&self.0).rewind()?;
        (&self.0).read_to_end(&mut table)?;
        Ok(parse(&table))
    }
}

/// The innermost mount that `path` is in, or is the root of.
pub fn containing(path: &Path) -> io::Result<Option<Mount>> {
    // max_by_key takes the last of equals.
    let within = OpenTable::open()?.read()?.into_iter().filter(|mount| path.starts_with(&mount.point));
    Ok(within.max_by_key(|mount| mount.point.components().count()))
}

/// A process that has the mount of this device in a mount namespace of its own, of those that we may look at.
pub fn elsewhere(device: &str) -> Option<String> {
    let has_it = |process: &PathBuf| {
        let table = fs::read(process.join("mountinfo")).unwrap_or_default();
        parse(&table).iter().any(|mount| mount.device == device)
    };
    let found = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()).find(has_it)?;
    let command = fs::read_to_string(found.join("comm")).unwrap_or_default();
    Some(format!("pid {} ({})", found.file_name()?.display(), command.trim_end()))
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 /root /mount/point rw,noatime master:1 - ext4 /dev/root rw`, with any number of fields
/// before the dash.
fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
    let point = unescape(fields.nth(1)?);
    fields.find(|field| *field == b"-")?;
    let kind = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    let source = String::from_utf8_lossy(&unescape(fields.next()?)).into_owned();
    Some(Mount { point: OsString::from_vec(point).into(), device, kind, source })
}

/// Undoes the kernel's `\040` for blanks and the like.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) = (first, tail) {
            plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            plain.push(*first);
            rest = tail;
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let table = b"22 28 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
            40 28 0:35 / /mnt/my\\040job\\134x rw - fuse.gradfs gradfs rw,user_id=0\n\
            41 28 0:36 / /mnt/old rw shared:1 master:2 - fuse gradfs rw\n\
            42 28 8:1 / /data rw - ext4 /dev/sda1 rw\n\
            short line\n\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 4);
        assert_eq!(mounts[1].point, Path::new("/mnt/my job\\x"));
        assert_eq!(mounts.iter().map(Mount::is_gradfs).collect::<Vec<_>>(), [false, true, true, false]);
        assert_eq!(mounts[0].to_string(), "sysfs");
        assert_eq!(mounts[2].device, "0:36");
        assert_eq!(mounts[3].to_string(), "/dev/sda1 (ext4)");
        assert!(!mounts[3].is_fuse());
    }

    #[test]
    fn a_disk_called_gradfs_is_not_ours() {
        let disk =
            Mount { point: "/".into(), device: "8:1".into(), kind: "ext4".into(), source: "gradfs".into() };
        assert!(!disk.is_gradfs());
    }

    #[test]
    fn escapes_at_the_end_do_not_run_over() {
        assert_eq!(unescape(b"a\\"), b"a\\");
        assert_eq!(unescape(b"a\\04"), b"a\\04");
        assert_eq!(unescape(b"\\777"), b"\\777");
        assert_eq!(unescape(b"\\377"), b"\xff");
    }

    #[test]
    fn the_live_table() {
        assert!(containing(Path::new("/proc/self")).unwrap().is_some());
        assert_eq!(topmost(Path::new("/proc")).unwrap().unwrap().kind, "proc");
        assert_eq!(topmost(Path::new("/nonexistent")).unwrap(), None);
    }
}
