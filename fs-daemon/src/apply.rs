//! `gradfs apply`: brings a copy of a model's `weights` to a newer version by a patch from
//! `versions/<n>/changes-since-<m>.patch`.
//!
//! The copy is read from its beginning to its end, with the patch's bytes in their places, and written beside it. Only
//! if the result has the checksum that the patch names, it takes the copy's place.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use libmodelio::bytes::changes::Runs;
use libmodelio::bytes::crc64::Crc64;
use libmodelio::formats::patch::{HEAD, PatchHead};

use crate::error::Error;
use crate::progress;

/// The bytes that are read at once.
const PIECE: u64 = 4 << 20;

/// The arguments of `gradfs apply`.
#[derive(Args, Debug)]
pub struct ApplyArgs {
    /// A patch: a file changes-since-M.patch of versions/N in a mount, or a copy of it
    #[arg(value_name = "PATCH", value_hint = ValueHint::FilePath)]
    pub patch: PathBuf,
    /// A copy of versions/M/weights; it becomes one of versions/N/weights
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// Write into FILE itself, once the result is proved; if that is interrupted, run the same command again
    #[arg(long)]
    pub in_place: bool,
}

/// A patch that was opened.
struct Patch {
    head: PatchHead,
    runs: Runs,
    /// At its values.
    file: BufReader<File>,
}

/// Applies a patch.
///
/// # Errors
/// Without a word on the file's contents if it stays as it was.
pub fn run(args: &ApplyArgs) -> Result<(), Error> {
    let file = &args.file;
    let failed = |error: io::Error| Error::new(format!("cannot patch {}", file.display())).caused_by(error);
    // A link stays one, and what it leads to is replaced.
    let target = fs::canonicalize(file).map_err(failed)?;
    // The same open file is checked and patched, wherever its name leads meanwhile.
    let old = OpenOptions::new().read(true).write(args.in_place).open(&target).map_err(failed)?;
    let metadata = old.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(Error::new(format!("{} is no regular file", file.display())));
    }
    let mut patch = Patch::open(&args.patch, (file, metadata.len()))?;
    if args.in_place {
        patch.prove(file, &old, io::sink())?;
        patch.write_into(&args.patch, &old).and_then(|()| old.sync_all()).map_err(|error| {
            failed(error).hint("the file may be patched in part: run the same command again")
        })?;
    } else {
        let beside = Beside::new(&target).map_err(failed)?;
        patch.prove(file, &old, &beside.file)?;
        let replace = || {
            fchown(&beside.file, Some(metadata.uid()), Some(metadata.gid()))?;
            beside.file.set_permissions(metadata.permissions())?;
            beside.file.sync_all()?;
            fs::rename(&beside.path, &target)?;
            File::open(target.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        replace().map_err(failed)?;
    }
    let PatchHead { base, version, values, .. } = patch.head;
    println!("gradfs: {} is version {version} (from {base}, {values} bytes replaced)", file.display());
    Ok(())
}

impl Patch {
    /// A patch for a file of this length.
    fn open(path: &Path, (file, file_len): (&Path, u64)) -> Result<Patch, Error> {
        let no_patch = |why: &dyn std::fmt::Display| {
            let error = Error::new(format!("cannot apply {}: {why}", path.display()));
            error.hint("nothing was changed; copy the patch again from versions/N/changes-since-M.patch")
        };
        let mut from = File::open(path).map_err(|error| no_patch(&error))?;
        let about = from.metadata().map_err(|error| no_patch(&error))?;
        if !about.is_file() {
            let why = format!("cannot apply {}: it is no regular file", path.display());
            return Err(Error::new(why).hint("nothing was changed; save the patch to a file first"));
        }
        let len = about.len();
        let mut bytes = [0; HEAD];
        from.read_exact(&mut bytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => no_patch(&"it is no patch of gradfs, or is cut off"),
            _ => no_patch(&error),
        })?;
        let head = PatchHead::decode(&bytes, len).map_err(|error| no_patch(&error))?;
        // The two numbers of a run take at most twice the bytes that it leads over.
        check_size(&head, file, file_len)?;
        if head.runs > head.size.saturating_mul(2).saturating_add(20) {
            return Err(no_patch(&"it has more runs than its model has bytes"));
        }
        let mut encoded = Vec::new();
        (&mut from).take(head.runs).read_to_end(&mut encoded).map_err(|error| no_patch(&error))?;
        let runs = Runs::decode(encoded, head.size).map_err(|error| no_patch(&error))?;
        if runs.bytes() != head.values {
            return Err(no_patch(&"its lengths disagree"));
        }
        Ok(Patch { head, runs, file: BufReader::with_capacity(1 << 20, from) })
    }

    /// Writes the newer version of `old` to `to`.
    fn prove(&mut self, path: &Path, old: &File, mut to: impl Write) -> Result<(), Error> {
        let failed =
            |error: io::Error| Error::new(format!("cannot patch {}", path.display())).caused_by(error);
        let bar = progress::bar(progress::BYTES, self.head.size, format!("patching {}", path.display()));
        let (mut crc, mut piece, mut at) = (Crc64::new(), Vec::new(), 0);
        let mut runs = self.runs.from(0).map(|(run, _)| run).peekable();
        while at < self.head.size {
            let end = self.head.size.min(at + PIECE);
            piece.resize((end - at) as usize, 0);
            old.read_exact_at(&mut piece, at).map_err(failed)?;
            while let Some(run) = runs.peek_mut().filter(|run| run.start < end) {
                let now = run.start..run.end.min(end);
                self.file.read_exact(&mut piece[within(&now, at)]).map_err(failed)?;
                run.start = now.end;
                if run.is_empty() {
                    runs.next();
                }
            }
            crc.update(&piece);
            to.write_all(&piece).map_err(failed)?;
            bar.inc(end - at);
            at = end;
        }
        bar.finish_and_clear();
        if crc.finish() == self.head.checksum {
            return Ok(());
        }
        let PatchHead { base, version, .. } = self.head;
        let what = format!(
            "{} would not be version {version} afterwards, by its checksum: it is no copy of version {base}, or the patch \
             is damaged",
            path.display()
        );
        Err(Error::new(what).hint(format!("nothing was changed; copy versions/{version}/weights")))
    }

    /// Writes the values to their places.
    fn write_into(&mut self, patch: &Path, file: &File) -> io::Result<()> {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", patch.display()));
        let values = HEAD as u64 + self.head.runs;
        self.file.seek(SeekFrom::Start(values)).map_err(named)?;
        let mut piece = Vec::new();
        for (run, _) in self.runs.from(0) {
            let mut at = run.start;
            while at < run.end {
                let end = run.end.min(at + PIECE);
                piece.resize((end - at) as usize, 0);
                self.file.read_exact(&mut piece).map_err(named)?;
                file.write_all_at(&piece, at)?;
                at = end;
            }
        }
        Ok(())
    }
}

fn check_size(head: &PatchHead, path: &Path, len: u64) -> Result<(), Error> {
    let PatchHead { size, base, .. } = *head;
    if len == size {
        return Ok(());
    }
    let what = format!("{} has {len} bytes, and the patch is of a model of {size}", path.display());
    Err(Error::new(what).hint(format!(
        "nothing was changed; give a copy of versions/{base}/weights (weights.safetensors has a header, and cannot be \
         patched)"
    )))
}

fn within(range: &Range<u64>, at: u64) -> Range<usize> {
    (range.start - at) as usize..(range.end - at) as usize
}

/// A new file beside another one. It is removed if it has not taken the other one's place.
struct Beside {
    path: PathBuf,
    file: File,
}

impl Beside {
    /// A file that a killed process has left, which had the same number, is taken over.
    fn new(target: &Path) -> io::Result<Beside> {
        let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = target.with_file_name(format!(".{name}.gradfs-{}", std::process::id()));
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let mut new = OpenOptions::new();
        new.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = new.open(&path).map_err(named)?;
        file.try_lock().map_err(|error| named(error.into()))?;
        // Whoever had it locked may have given it another name since.
        let (there, ours) = (fs::symlink_metadata(&path).map_err(named)?, file.metadata()?);
        if (there.dev(), there.ino()) != (ours.dev(), ours.ino()) {
            return Err(named(io::ErrorKind::ResourceBusy.into()));
        }
        file.set_len(0).map_err(named)?;
        Ok(Beside { path, file })
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // After a rename it is not there any more.
        let _ = fs::remove_file(&self.path);
    }
}
