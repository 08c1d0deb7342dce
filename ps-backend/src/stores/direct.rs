//! Files that are read and written past the kernel's cache. A snapshot is too large to stay there: it would drive out what
//! is needed, and taking its pages costs more than the way to the disk.
//!
//! The kernel asks for memory, offsets and lengths that are multiples of a page. What is none goes through the cache, and
//! so does all where the filesystem does not know better.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, Write as _};
use std::os::unix::fs::FileExt as _;

use libmodelio::bytes::pages::Pages;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// What a disk reads and writes at least.
const PAGE: usize = 4096;
/// Below this, the kernel's cache is faster.
const LARGE: usize = 1 << 20;
/// What is written at once, if it has to be copied first.
const COPIED: usize = 4 << 20;

/// From now on a file goes past the cache, or through it. False if its filesystem cannot.
fn set_direct(file: &File, is_direct: bool) -> bool {
    let Ok(flags) = fcntl(file, FcntlArg::F_GETFL) else { return false };
    let mut flags = OFlag::from_bits_retain(flags);
    flags.set(OFlag::O_DIRECT, is_direct);
    fcntl(file, FcntlArg::F_SETFL(flags)).is_ok()
}

/// Whether the filesystem has refused what lies on no boundary of its own.
fn is_refused(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

fn whole_pages(bytes: usize) -> usize {
    bytes / PAGE * PAGE
}

/// Fills `bytes` from an offset of a file.
pub(super) fn read(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let begins_pages = bytes.as_ptr().addr().is_multiple_of(PAGE) && offset.is_multiple_of(PAGE as u64);
    let mut done = 0;
    if begins_pages && bytes.len() >= LARGE && set_direct(file, true) {
        let pages = whole_pages(bytes.len());
        match file.read_exact_at(&mut bytes[..pages], offset) {
            Ok(()) => done = pages,
            Err(error) if is_refused(&error) => {}
            Err(error) => return Err(error),
        }
        set_direct(file, false);
    }
    file.read_exact_at(&mut bytes[done..], offset + done as u64)
}

/// Writes all of several parts to a new file.
pub(super) fn write(file: &mut File, parts: &[&[u8]]) -> io::Result<()> {
    let all: usize = parts.iter().map(|part| part.len()).sum();
    if all < LARGE || !set_direct(file, true) {
        return write_through_cache(file, parts);
    }
    let (mut room, mut held, mut at) = (Pages::default(), 0, 0);
    for part in parts {
        let mut left = *part;
        while !left.is_empty() {
            let pages = whole_pages(left.len());
            if held == 0 && pages > 0 && left.as_ptr().addr().is_multiple_of(PAGE) {
                write_at(file, &left[..pages], &mut at)?;
                left = &left[pages..];
                continue;
            }
            if room.is_empty() {
                room = Pages::new(COPIED)?;
            }
            let now = left.len().min(COPIED - held);
            room[held..held + now].copy_from_slice(&left[..now]);
            (held, left) = (held + now, &left[now..]);
            if held == COPIED {
                write_at(file, &room, &mut at)?;
                held = 0;
            }
        }
    }
    let pages = whole_pages(held);
    write_at(file, &room[..pages], &mut at)?;
    set_direct(file, false);
    write_at(file, &room[pages..held], &mut at)
}

fn write_at(file: &File, bytes: &[u8], at: &mut u64) -> io::Result<()> {
    match file.write_all_at(bytes, *at) {
        // What was written before is written again.
        Err(error) if is_refused(&error) && set_direct(file, false) => file.write_all_at(bytes, *at)?,
        outcome => outcome?,
    }
    *at += bytes.len() as u64;
    Ok(())
}

/// Writes all of several parts, many with one call.
fn write_through_cache(file: &mut File, parts: &[&[u8]]) -> io::Result<()> {
    /// The most that one call takes.
    const MOST: usize = 1024;
    for some in parts.chunks(MOST) {
        let mut slices: Vec<IoSlice<'_>> = some.iter().map(|part| IoSlice::new(part)).collect();
        let mut left = &mut slices[..];
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            match file.write_vectored(left) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(wrote) => IoSlice::advance_slices(&mut left, wrote),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    fn file(dir: &tempfile::TempDir) -> File {
        OpenOptions::new().create_new(true).read(true).write(true).open(dir.path().join("file")).unwrap()
    }

    #[test]
    fn parts_of_any_length_and_place_are_read_as_they_were_written() {
        let bytes: Vec<u8> =
            (0..9 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut aligned = Pages::new(bytes.len()).unwrap();
        aligned.copy_from_slice(&bytes);
        for lengths in [&[9 << 20][..], &[4 << 20, 4096, 1, 4095, 1 << 20, 77], &[5, 0, 3 << 20], &[9], &[]] {
            let dir = tempfile::tempdir().unwrap();
            let (mut file, mut at) = (file(&dir), 0);
            let part = |len: &usize| {
                at += len;
                &aligned[at - len..at]
            };
            let parts: Vec<&[u8]> = lengths.iter().map(part).collect();
            write(&mut file, &parts).unwrap();
            assert_eq!(file.metadata().unwrap().len(), at as u64, "{lengths:?}");
            let mut room = Pages::new(at + PAGE).unwrap();
            for (from, shift) in [(0, 0), (PAGE.min(at), 0), (at / 3, 0), (0, 1)] {
                let read_here = &mut room[shift..shift + at - from];
                read(&file, read_here, from as u64).unwrap();
                assert!(read_here == &bytes[from..at], "{lengths:?}, from {from}, to {shift}");
            }
            let end = read(&file, &mut room[..at + 1], 0).unwrap_err();
            assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_filesystem_that_has_only_its_cache_takes_files_too() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (bytes, mut file) = (vec![7; 3 << 20], file(&dir));
        write(&mut file, &[&bytes]).unwrap();
        let mut room = Pages::new(bytes.len()).unwrap();
        read(&file, &mut room, 0).unwrap();
        assert!(room[..] == bytes[..]);
    }
}
