//! Pidfd system calls: open one, and ask it how its process ended.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `_IOWR(0xFF, 11, struct pidfd_info)` with the first published size of the struct: the kernel takes
/// the size from the number and fills no more than that.
const PIDFD_GET_INFO: libc::c_ulong = 0xC000_FF0B | ((size_of::<PidfdInfo>() as libc::c_ulong) << 16);
/// Asks for, and says that there is, an exit code.
const PIDFD_INFO_EXIT: u64 = 1 << 3;

/// `struct pidfd_info` of `include/uapi/linux/pidfd.h`, as first published.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroupid: u64,
    pid: u32,
    tgid: u32,
    ppid: u32,
    ruid: u32,
    rgid: u32,
    euid: u32,
    egid: u32,
    suid: u32,
    sgid: u32,
    fsuid: u32,
    fsgid: u32,
    exit_code: i32,
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// Opens a pidfd for the process (thread group) `pid`; closed on exec.
pub fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: pidfd_open takes two integers and touches no memory of ours.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so this is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as libc::c_int) })
}

/// The wait status of a process that has been reaped; None while there is none, or where the kernel
/// (before 6.15) keeps none.
pub fn exit_status(pidfd: BorrowedFd<'_>) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the kernel writes at most the size encoded in the number, which is that of `info`, and
    // `info` is plain integers, valid whatever is written. The cast is for musl, whose ioctl takes an int.
    let result = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO as _, &raw mut info) };
    (result == 0 && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
}

/// Whether the process has been reaped: its number may belong to another process by now.
pub fn reaped(pidfd: BorrowedFd<'_>) -> bool {
    // SAFETY: signal 0 with no siginfo and no flags sends nothing and touches no memory of ours.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            0,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    // A zombie still takes it, and EPERM means that there is somebody to refuse it for.
    result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}
