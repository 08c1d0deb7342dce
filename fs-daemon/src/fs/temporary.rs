//! Files that a program makes beside `gradients.safetensors` and `publish.safetensors`, to rename onto one of them: what
//! libraries do that write a file as a whole. Their bytes are in memory until then.
//!
//! They are few, and no longer than a file for the model can be. A file is gone when it was renamed, or with its process.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libmodelio::formats::named::NamedStream;
use libmodelio::vocabulary::ids::LearnerId;
use libmodelio::vocabulary::layout::ModelLayout;
use parking_lot::Mutex;

use super::Owner;
use super::node::File;
use crate::session::error::{CallError, CallResult, Done};

/// How the name of such a file begins.
const PREFIX: &str = ".tmp";
/// The longest name of one.
const MAX_NAME: usize = 64;
/// Such files in one directory: one for each of the two that they are renamed onto.
const MAX_FILES_OF_DIRECTORY: usize = 2;

/// Whether the program lives that has made a file.
pub type Lives = Box<dyn Fn() -> bool + Send + Sync>;

/// One such file.
pub struct Temporary {
    /// The number of its inode.
    pub number: u64,
    /// The directory that it is in.
    pub parent: File,
    /// User and group that have made it.
    pub owner: Owner,
    maker: Option<Lives>,
    name: String,
    max_bytes: u64,
    /// It was renamed while another one was under way.
    waits: AtomicBool,
    contents: Mutex<Vec<u8>>,
    fate: Mutex<Fate>,
}

/// The fate of a file.
#[derive(Default)]
enum Fate {
    /// It has its name.
    #[default]
    Named,
    /// It was renamed, and what it has is being committed. These want to know the outcome.
    Commits(Vec<Done<()>>),
    /// That has an outcome, or the file was removed.
    Over(CallResult<()>),
}

impl Temporary {
    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.contents.lock().len() as u64
    }

    /// Gives up to `len` bytes at `offset` to `with`.
    pub fn read<R>(&self, offset: u64, len: usize, with: impl FnOnce(&[u8]) -> R) -> R {
        let contents = self.contents.lock();
        let start = (contents.len() as u64).min(offset) as usize;
        with(&contents[start..contents.len().min(start.saturating_add(len))])
    }

    /// Stores bytes.
    ///
    /// # Errors
    /// EFBIG beyond what a file for the model can have; EBUSY once it was renamed.
    pub fn write(&self, offset: u64, data: &[u8]) -> CallResult<()> {
        let end = offset.saturating_add(data.len() as u64);
        self.check_change(end)?;
        let mut contents = self.contents.lock();
        if contents.len() < end as usize {
            contents.resize(end as usize, 0);
        }
        contents[offset as usize..end as usize].copy_from_slice(data);
        Ok(())
    }

    /// Cuts it or fills it up with zeros.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn resize(&self, size: u64) -> CallResult<()> {
        self.check_change(size)?;
        let mut contents = self.contents.lock();
        match contents.is_empty() {
            // The system's zeros take no time before they are written.
            true => *contents = vec![0; size as usize],
            false => contents.resize(size as usize, 0),
        }
        Ok(())
    }

    fn check_change(&self, end: u64) -> CallResult<()> {
        if end > self.max_bytes {
            let what = format!("a file for this model has at most {} bytes", self.max_bytes);
            return Err(CallError::new(libc::EFBIG, what));
        }
        match *self.fate.lock() {
            Fate::Named => Ok(()),
            Fate::Commits(_) | Fate::Over(_) => {
                Err(CallError::new(libc::EBUSY, "the file was renamed or removed"))
            }
        }
    }

    /// What it has is committed from now on. Returns its bytes.
    pub fn renamed(&self) -> Vec<u8> {
        *self.fate.lock() = Fate::Commits(Vec::new());
        std::mem::take(&mut *self.contents.lock())
    }

    /// Its name is gone, and so are its bytes, unless they are being committed.
    pub fn discard(&self) {
        let mut fate = self.fate.lock();
        if matches!(*fate, Fate::Named) {
            *fate = Fate::Over(Ok(()));
            *self.contents.lock() = Vec::new();
        }
    }

    /// The one before it is over.
    pub fn goes_on(&self) {
        self.waits.store(false, Ordering::Relaxed);
    }

    fn is_under_way(&self) -> bool {
        matches!(*self.fate.lock(), Fate::Commits(_))
    }

    /// That has this outcome.
    pub fn over(&self, outcome: CallResult<()>) {
        let before = std::mem::replace(&mut *self.fate.lock(), Fate::Over(outcome.clone()));
        if let Fate::Commits(waiting) = before {
            waiting.into_iter().for_each(|done| done(outcome.clone()));
        }
    }

    /// A close of the file: it hears what became of a commit.
    pub fn closed(&self, done: Done<()>) {
        let outcome = match &mut *self.fate.lock() {
            Fate::Named => Ok(()),
            Fate::Commits(waiting) => return waiting.push(done),
            Fate::Over(outcome) => outcome.clone(),
        };
        done(outcome);
    }
}

/// Such files of one model.
#[derive(Default)]
pub struct Temporaries {
    made: AtomicU64,
    files: Mutex<BTreeMap<u64, Arc<Temporary>>>,
    /// The last one that was renamed onto each target.
    last: Mutex<HashMap<File, Arc<Temporary>>>,
}

impl Temporaries {
    /// Whether a program may make a file of this name here.
    pub fn may_be_called(parent: File, name: &str) -> bool {
        matches!(parent, File::Dir | File::Learner(_))
            && name.starts_with(PREFIX)
            && (PREFIX.len() + 1..=MAX_NAME).contains(&name.len())
            && name[PREFIX.len()..].chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    }

    /// Makes one.
    ///
    /// # Errors
    /// EEXIST; ENOSPC with the most files that may be there.
    pub fn make(
        &self,
        parent: File,
        name: &str,
        (owner, maker): (Owner, Option<Lives>),
        layout: &ModelLayout,
    ) -> CallResult<Arc<Temporary>> {
        let mut files = self.files.lock();
        let of_directory = files.values().filter(|file| file.parent == parent);
        if of_directory.clone().any(|file| file.name == name) {
            return Err(CallError::new(libc::EEXIST, "there is such a file"));
        }
        if of_directory.count() >= MAX_FILES_OF_DIRECTORY {
            let what =
                format!("{MAX_FILES_OF_DIRECTORY} temporary files are here: rename or remove one first");
            return Err(CallError::new(libc::ENOSPC, what));
        }
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let file = Arc::new(Temporary {
            number,
            parent,
            owner,
            maker,
            name: name.to_owned(),
            max_bytes: NamedStream::max_bytes(layout),
            waits: AtomicBool::new(false),
            contents: Mutex::default(),
            fate: Mutex::default(),
        });
        files.insert(number, Arc::clone(&file));
        Ok(file)
    }

    /// The file of this name.
    pub fn named(&self, parent: File, name: &str) -> Option<Arc<Temporary>> {
        self.files.lock().values().find(|file| file.parent == parent && file.name == name).cloned()
    }

    /// The file with this number.
    pub fn get(&self, number: u64) -> Option<Arc<Temporary>> {
        self.files.lock().get(&number).cloned()
    }

    /// Nobody has the file open any more.
    pub fn closed(&self, file: &Temporary) {
        if file.maker.is_none() {
            self.remove(file.number);
            file.discard();
        }
    }

    /// Removes the files of programs that have ended, and of learners that are not in the job. To be called now and then.
    pub fn forget_dead(&self, is_in: impl Fn(LearnerId) -> bool) {
        self.last.lock().retain(|_, file| file.is_under_way());
        self.files.lock().retain(|_, file| {
            let has_directory = file.parent.learner().is_none_or(&is_in);
            has_directory && file.maker.as_ref().is_none_or(|lives| lives())
        });
    }

    /// The file is about to be renamed onto `target`. Returns the one before it, if that is under way.
    ///
    /// # Errors
    /// EBUSY if that one waits, too.
    pub fn follows(&self, target: File, file: &Arc<Temporary>) -> CallResult<Option<Arc<Temporary>>> {
        let mut last = self.last.lock();
        let before = last.get(&target).filter(|before| before.is_under_way());
        if before.is_some_and(|before| before.waits.load(Ordering::Relaxed)) {
            let what =
                "two files before this one are not committed yet: open weights first, which waits for them";
            return Err(CallError::new(libc::EBUSY, what));
        }
        let before = before.cloned();
        file.waits.store(before.is_some(), Ordering::Relaxed);
        last.insert(target, Arc::clone(file));
        Ok(before)
    }

    /// Takes a name away.
    pub fn remove(&self, number: u64) -> Option<Arc<Temporary>> {
        self.files.lock().remove(&number)
    }
}

#[cfg(test)]
mod tests {
    use libmodelio::vocabulary::layout::DType;

    use super::*;

    const HERE: File = File::Learner(LearnerId(3));

    fn layout() -> ModelLayout {
        ModelLayout::blank(4096, DType::F32, 64 << 10).unwrap()
    }

    #[test]
    fn only_temporary_names_in_two_kinds_of_directories_are_made() {
        for (parent, name, may) in [
            (HERE, ".tmpA1_b", true),
            (File::Dir, ".tmpx", true),
            (File::Learners, ".tmpx", false),
            (File::Controls, ".tmpx", false),
            (HERE, ".tmp", false),
            (HERE, ".tmp.x", false),
            (HERE, "tmpx", false),
            (HERE, "weights", false),
            (HERE, &*format!(".tmp{}", "x".repeat(61)), false),
        ] {
            assert_eq!(Temporaries::may_be_called(parent, name), may, "{parent:?} {name}");
        }
    }

    #[test]
    fn they_are_few_and_short() {
        let (files, layout) = (Temporaries::default(), layout());
        let make = |parent, name| files.make(parent, name, ((0, 0), None), &layout);
        let one = make(HERE, ".tmpa").unwrap();
        assert_eq!(make(HERE, ".tmpa").err().map(|error| error.errno), Some(libc::EEXIST));
        let two = make(HERE, ".tmpb").unwrap();
        assert_eq!(make(HERE, ".tmpc").err().map(|error| error.errno), Some(libc::ENOSPC));
        assert!(make(File::Dir, ".tmpc").is_ok(), "another directory");
        let most = NamedStream::max_bytes(&layout);
        assert_eq!(one.write(most, &[1]).map_err(|error| error.errno), Err(libc::EFBIG));
        assert_eq!(one.resize(most + 1).map_err(|error| error.errno), Err(libc::EFBIG));
        assert!(one.resize(most).is_ok() && one.write(most - 1, &[1]).is_ok());
        assert_eq!((one.size(), one.read(most - 2, 9, <[u8]>::to_vec)), (most, vec![0, 1]));
        files.remove(two.number);
        assert!(files.named(HERE, ".tmpb").is_none() && make(HERE, ".tmpc").is_ok());
    }

    #[test]
    fn they_are_gone_with_their_program_or_learner() {
        let (files, layout) = (Temporaries::default(), layout());
        let lives = Arc::new(std::sync::atomic::AtomicBool::new(true));
        let maker = || {
            let lives = Arc::clone(&lives);
            Some(Box::new(move || lives.load(Ordering::Relaxed)) as Lives)
        };
        let one = files.make(HERE, ".tmpa", ((0, 0), maker()), &layout).unwrap();
        let unseen = files.make(HERE, ".tmpb", ((0, 0), None), &layout).unwrap();
        files.make(File::Dir, ".tmpa", ((0, 0), maker()), &layout).unwrap();
        files.closed(&one);
        files.closed(&unseen);
        assert!(files.named(HERE, ".tmpa").is_some() && files.named(HERE, ".tmpb").is_none());
        files.forget_dead(|_| true);
        assert!(files.named(HERE, ".tmpa").is_some());
        files.forget_dead(|id| id != LearnerId(3));
        assert!(files.named(HERE, ".tmpa").is_none() && files.named(File::Dir, ".tmpa").is_some());
        lives.store(false, Ordering::Relaxed);
        files.forget_dead(|_| true);
        assert!(files.named(File::Dir, ".tmpa").is_none());
    }

    #[test]
    fn one_waits_for_the_one_before_it_and_no_more() {
        let (files, layout) = (Temporaries::default(), layout());
        let follows = |name: &str, target| {
            let file = files.make(HERE, name, ((0, 0), None), &layout).unwrap();
            let before = files.follows(target, &file);
            files.remove(file.number);
            file.renamed();
            (file, before.map(|before| before.map(|file| file.number)))
        };
        let target = File::LearnerNamedGradients(LearnerId(3));
        let (one, before) = follows(".tmpa", target);
        assert_eq!(before, Ok(None));
        let (two, before) = follows(".tmpb", target);
        assert_eq!(before, Ok(Some(one.number)));
        assert_eq!(follows(".tmpc", target).1.map_err(|error| error.errno), Err(libc::EBUSY));
        assert_eq!(follows(".tmpc", File::LearnerNamedPublish(LearnerId(3))).1, Ok(None));
        one.over(Ok(()));
        two.over(Ok(()));
        assert_eq!(follows(".tmpd", target).1, Ok(None));
    }

    #[test]
    fn a_close_hears_what_became_of_the_commit() {
        let files = Temporaries::default();
        let file = files.make(HERE, ".tmpa", ((0, 0), None), &layout()).unwrap();
        let (sender, outcomes) = std::sync::mpsc::channel();
        let close = || {
            let sender = sender.clone();
            file.closed(Box::new(move |outcome| sender.send(outcome).unwrap()));
        };
        file.write(0, b"xyz").unwrap();
        close();
        assert_eq!(outcomes.try_recv(), Ok(Ok(())), "nothing is committed");
        assert_eq!(file.renamed(), b"xyz");
        close();
        assert!(outcomes.try_recv().is_err(), "it waits");
        assert_eq!(file.write(0, b"x").map_err(|error| error.errno), Err(libc::EBUSY));
        let error = CallError::new(libc::EIO, "lost");
        file.over(Err(error.clone()));
        close();
        assert_eq!((outcomes.try_recv(), outcomes.try_recv()), (Ok(Err(error.clone())), Ok(Err(error))));
    }
}
