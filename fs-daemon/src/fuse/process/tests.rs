//! Real children, ended in every way.

use std::collections::HashSet;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;

use super::*;

const LONG: Duration = Duration::from_secs(600);

/// A shell that runs `script` once its stdin closes, so that the pidfd is open before it ends.
fn held(script: &str) -> Child {
    Command::new("sh")
        .args(["-c", &format!("read -r line; {script}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn release(child: &mut Child) {
    drop(child.stdin.take());
}

fn of(child: &Child) -> Process {
    Process::of_thread(child.id()).unwrap()
}

/// Linux 6.15 keeps the status of reaped processes in their pidfds.
fn kernel_keeps_status() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map(|n| n.parse::<u32>().unwrap_or(0));
    let (major, minor) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let keeps = (major, minor) >= (6, 15);
    if !keeps {
        println!("skipped: this kernel keeps no status of reaped processes");
    }
    keeps
}

const ENDS: [(&str, Exit); 5] = [
    ("exit 0", Exit::Code(0)),
    ("exit 1", Exit::Code(1)),
    ("exit 3", Exit::Code(3)),
    ("kill -9 $$", Exit::Signal(9)),
    ("kill -TERM $$", Exit::Signal(15)),
];

#[test]
fn zombies_have_an_exit_status() {
    for (script, exit) in ENDS {
        let mut child = held(script);
        let process = of(&child);
        assert_eq!(process.tgid(), child.id());
        assert_eq!(process.exited(), None);
        release(&mut child);
        assert_eq!(process.wait_exit(LONG), Some(exit), "{script}");
        assert_eq!(process.exited(), Some(exit), "{script}, asked again");
        child.wait().unwrap();
    }
}

#[test]
fn reaped_processes_have_an_exit_status() {
    if !kernel_keeps_status() {
        return;
    }
    for (script, exit) in ENDS {
        let mut child = held(script);
        let process = of(&child);
        release(&mut child);
        child.wait().unwrap();
        assert!(!fs::exists(format!("/proc/{}", child.id())).unwrap());
        assert_eq!(process.exited(), Some(exit), "{script}");
        assert!(Process::of_thread(child.id()).is_none(), "gone, so there is nothing to hold");
    }
}

#[test]
fn status_survives_reaping_at_any_moment() {
    if !kernel_keeps_status() {
        return;
    }
    for _ in 0..100 {
        let mut child = held("exit 7");
        let process = of(&child);
        release(&mut child);
        let reaper = thread::spawn(move || child.wait().unwrap());
        assert_eq!(process.wait_exit(LONG), Some(Exit::Code(7)));
        reaper.join().unwrap();
    }
}

#[test]
fn a_thread_leads_to_its_process() {
    let tid = thread::spawn(|| {
        let tid = nix::unistd::gettid().as_raw() as u32;
        (tid, Process::of_thread(tid).unwrap().tgid())
    });
    let (tid, tgid) = tid.join().unwrap();
    assert_eq!(tgid, std::process::id());
    assert_ne!(tid, tgid);
    assert!(Process::of_thread(0).is_none());
    assert!(Process::of_thread(u32::MAX).is_none());
}

#[test]
fn waiting_is_bounded() {
    let child = held("exit 0");
    let process = of(&child);
    let start = Instant::now();
    assert_eq!(process.wait_exit(Duration::from_millis(30)), None);
    assert!(start.elapsed() >= Duration::from_millis(30));
    drop(child);
}

#[test]
fn names_with_brackets_do_not_confuse() {
    let tail = "1 ".repeat(48);
    assert_eq!(status_in_stat(&format!("12 (a) R (b) Z {tail}9")), Some(9));
    assert_eq!(status_in_stat(&format!("12 (a) Z (b) R {tail}9")), None, "it runs");
    assert_eq!(status_in_stat("12 (a) Z 1 2"), None);
    assert_eq!(status_in_stat(""), None);
}

#[test]
fn status_words() {
    assert_eq!(Exit::from_status(0x0300), Exit::Code(3));
    assert_eq!(Exit::from_status(0x8b), Exit::Signal(11), "dumped core");
    assert_eq!(Exit::Signal(9).to_string(), "killed by SIGKILL");
}

#[test]
fn the_watcher_reports_every_end_once_and_closes_its_descriptors() {
    let (sender, reports) = mpsc::channel();
    let watcher = Watcher::start(move |key, exit| sender.send((key, exit)).unwrap()).unwrap();
    let mut children = Vec::new();
    let mut pidfds = Vec::new();
    for key in 0..20u64 {
        let child = held(&format!("exit {key}"));
        let process = of(&child);
        pidfds.push(process.as_fd().as_raw_fd());
        watcher.watch(Arc::new(process), key).unwrap();
        children.push(child);
    }
    assert_eq!(watcher.watched(), 20);
    assert!(reports.recv_timeout(Duration::from_millis(20)).is_err(), "none has ended");
    children.iter_mut().for_each(release);
    let mut seen = HashSet::new();
    for _ in 0..20 {
        let (key, exit) = reports.recv_timeout(LONG).unwrap();
        assert_eq!(exit, Exit::Code(key as i32));
        assert!(seen.insert(key));
    }
    assert_eq!(watcher.watched(), 0);
    watcher.shutdown();
    assert!(reports.recv().is_err(), "the callback is gone with the thread");
    for mut child in children {
        child.wait().unwrap();
    }
}

#[test]
fn ended_before_it_is_watched_and_forgotten_before_it_ends() {
    let (sender, reports) = mpsc::channel();
    let watcher = Watcher::start(move |key, exit| sender.send((key, exit)).unwrap()).unwrap();
    let (mut early, mut forgotten) = (held("exit 2"), held("exit 4"));
    let process = of(&early);
    watcher.watch(Arc::new(of(&forgotten)), 4).unwrap();
    watcher.forget(4);
    assert_eq!(watcher.watched(), 0);
    release(&mut forgotten);
    forgotten.wait().unwrap();
    release(&mut early);
    early.wait().unwrap();
    watcher.watch(Arc::new(process), 2).unwrap();
    assert_eq!(reports.recv_timeout(LONG).unwrap().0, 2);
    drop(watcher);
    assert!(reports.recv().is_err(), "nothing else was reported");
}

#[test]
fn shutdown_from_a_report_does_not_wait_for_itself() {
    let (sender, reports) = mpsc::channel();
    let slot = Arc::new(Mutex::new(None::<Watcher>));
    let own = Arc::clone(&slot);
    let watcher = Watcher::start(move |_, exit| {
        own.lock().take().unwrap().shutdown();
        sender.send(exit).unwrap();
    })
    .unwrap();
    let mut child = held("exit 5");
    let process = of(&child);
    *slot.lock() = Some(watcher);
    slot.lock().as_ref().unwrap().watch(Arc::new(process), 1).unwrap();
    release(&mut child);
    assert_eq!(reports.recv_timeout(LONG).unwrap(), Exit::Code(5));
    child.wait().unwrap();
}

#[test]
fn the_end_of_the_main_thread_is_not_the_end_of_the_process() {
    let script = "
import ctypes, os, sys, threading
def late():
    sys.stdin.read()
    os._exit(3)
threading.Thread(target=late).start()
ctypes.CDLL(None).syscall(60, 0)";
    let child = Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).spawn();
    let (Ok(mut child), true) = (child, cfg!(target_arch = "x86_64")) else {
        println!("skipped: needs python3 on x86-64");
        return;
    };
    let process = of(&child);
    let deadline = Instant::now() + LONG;
    while !fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap().contains(") Z") {
        assert!(Instant::now() < deadline, "the main thread did not end");
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(process.exited(), None);
    release(&mut child);
    assert_eq!(process.wait_exit(LONG), Some(Exit::Code(3)), "as a zombie");
    child.wait().unwrap();
    assert_eq!(process.exited(), Some(Exit::Code(3)), "reaped");
}

#[test]
fn held_children_wait() {
    // Guards the other tests: a child that did not wait would make them prove nothing.
    let mut child = held("echo done");
    let mut text = String::new();
    release(&mut child);
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "done\n");
    child.wait().unwrap();
}

#[test]
fn signals_that_end_a_wait_are_distinguished_from_those_that_do_not() {
    let status = |pending: &str, shared: &str, blocked: &str, ignored: &str| {
        ending_in_status(&format!(
            "Name:\tx\nSigQ:\t0/1\nSigPnd:\t{pending}\nShdPnd:\t{shared}\nSigBlk:\t{blocked}\nSigIgn:\t{ignored}\nSigCgt:\t0\n"
        ))
    };
    assert_eq!(status("0", "0", "0", "0"), None);
    assert_eq!(status("100", "0", "0", "0"), Some(Ending::Killed));
    assert_eq!(status("0", "0000000000000100", "ffffffffffffffff", "0"), Some(Ending::Killed));
    assert_eq!(status("0", "0000000000000002", "0", "0"), Some(Ending::Asked), "SIGINT");
    assert_eq!(status("0000000000004000", "0", "0", "0"), Some(Ending::Asked), "SIGTERM");
    assert_eq!(status("0", "2", "2", "0"), None, "blocked");
    assert_eq!(status("0", "2", "0", "2"), None, "ignored");
    assert_eq!(status("0", "10000", "0", "0"), None, "SIGCHLD");
}

#[test]
fn threads_of_an_exiting_program_are_distinguished_from_those_of_a_killed_one() {
    let stat = |flags: u64, status: i32| {
        let between = "0 ".repeat(52 - 10);
        format!("7 (a ) b) R 1 1 1 0 -1 {flags} {between}{status} 0\n")
    };
    let (signaled, kernel) = (0x400, 0x20_0000);
    assert!(!closes_by_death(&stat(0, 0), || true), "alive");
    assert!(closes_by_death(&stat(signaled, libc::SIGKILL), || false));
    assert!(closes_by_death(&stat(signaled, libc::SIGSEGV | 0x80), || false), "with a core");
    assert!(!closes_by_death(&stat(signaled, 7 << 8), || false), "exit(7) of a program with threads");
    assert!(!closes_by_death(&stat(signaled, 0), || false), "exit(0)");
    assert!(closes_by_death(&stat(signaled, 0), || true), "not for us to see");
    assert!(closes_by_death(&stat(kernel, 0), || false));
    assert!(!closes_by_death("", || true), "gone");
}

#[test]
fn a_thread_with_memory_is_told_from_those_without() {
    assert!(has_memory("2190 1040 900 5 0 300 0\n"));
    // A zombie and a thread of the kernel; a thread that is gone.
    assert!(!has_memory("0 0 0 0 0 0 0\n") && !has_memory(""));
    assert!(!is_killed_or_kernel(std::process::id()));
}
