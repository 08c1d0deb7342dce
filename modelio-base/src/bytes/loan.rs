//! Memory that a program outside of this process has by a descriptor of its own.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};

use super::mmap::Mapping;

/// A loan of memory. Nobody can know who else has a descriptor or a mapping of it, so it ends in one way alone: somebody
/// says that all of these are closed ([`Loan::give_back`]). If a loan is dropped without that, its memory stays lent,
/// and is never written again.
#[must_use]
#[derive(Debug)]
pub struct Loan(Arc<Mapping>);

impl Loan {
    /// Lends `memory`. The descriptor is for reading, and has an offset of its own.
    ///
    /// # Errors
    /// `InvalidInput` unless it is a memfd that nobody can write through a descriptor; EMFILE and what else the kernel
    /// says.
    pub fn of(memory: &Arc<Mapping>) -> io::Result<(Loan, OwnedFd)> {
        let fd = memory.fd().ok_or(io::ErrorKind::InvalidInput)?;
        let seals = SealFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GET_SEALS)?);
        if !seals.intersects(SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_FUTURE_WRITE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let file = File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        memory.lent.fetch_add(1, Ordering::Release);
        Ok((Loan(Arc::clone(memory)), file.into()))
    }

    /// Nobody outside has the memory by this loan any more.
    pub fn give_back(self) {
        self.0.lent.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use nix::errno::Errno;

    use super::*;

    #[test]
    fn memory_is_lent_until_each_loan_of_it_is_given_back() {
        let memory = Arc::new(Mapping::memfd("test", 5000).unwrap());
        memory.seal().unwrap();
        let (first, _) = Loan::of(&memory).unwrap();
        let (second, _) = Loan::of(&memory).unwrap();
        first.give_back();
        assert!(memory.is_lent());
        second.give_back();
        assert!(!memory.is_lent());
        drop(Loan::of(&memory).unwrap());
        let (third, _) = Loan::of(&memory).unwrap();
        third.give_back();
        assert!(memory.is_lent(), "one of them was not given back");
    }

    #[test]
    fn a_lent_descriptor_reads_from_the_beginning_and_can_neither_write_nor_seal() {
        let memory = Arc::new(Mapping::memfd("test", 5000).unwrap());
        assert_eq!(Loan::of(&memory).unwrap_err().kind(), io::ErrorKind::InvalidInput, "not sealed");
        memory.seal().unwrap();
        let (loan, file) = Loan::of(&memory).unwrap();
        let (other, again) = Loan::of(&memory).unwrap();
        assert_eq!(nix::unistd::read(&file, &mut [1; 6000]), Ok(5000));
        assert_eq!(nix::unistd::read(&again, &mut [1; 10]), Ok(10), "offsets are not shared");
        assert_eq!(nix::unistd::write(&file, b"x"), Err(Errno::EBADF));
        let seal = FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SEAL);
        assert_eq!(fcntl(&file, seal), Err(Errno::EPERM));
        // Its holder may open it anew to write, and seal its seals.
        let anew = File::options().write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert_eq!(nix::unistd::write(&anew, b"x"), Err(Errno::EPERM));
        fcntl(&anew, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SEAL)).unwrap();
        memory.fix_size().unwrap();
        drop((loan, other));
    }
}
