//! Objects as files of a directory. A file is written under a name of its own, synced to its disk, and takes its place by
//! one rename; then the directory is synced. So a power cut leaves the object or nothing.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{Existing, Listed, MAX_WHOLE, Objects, StoreError, direct};

/// In the name of a file that has no place yet.
const PARTIAL: &str = ".partial-";

/// A directory as a store.
#[derive(Debug)]
pub struct Directory {
    url: String,
    path: PathBuf,
}

impl Directory {
    /// The store in the directory of this absolute path, which need not be there yet.
    pub fn new(path: &Path) -> Directory {
        Directory { url: format!("file://{}", path.display()), path: path.to_owned() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn failed(&self, name: &str) -> impl Fn(io::Error) -> StoreError + use<> {
        let path = self.at(name);
        move |error| match error.kind() {
            ErrorKind::NotFound => StoreError::Missing(path.display().to_string()),
            ErrorKind::AlreadyExists => StoreError::Exists(path.display().to_string()),
            _ => StoreError::Failed { name: path.display().to_string(), why: error.to_string() },
        }
    }

    /// Opens an object. What is no regular file could keep its reader waiting.
    fn file(&self, name: &str) -> Result<(File, u64), StoreError> {
        let failed = self.failed(name);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.at(name));
        let file = file.map_err(&failed)?;
        let metadata = file.metadata().map_err(&failed)?;
        if !metadata.is_file() {
            return Err(failed(io::Error::other("it is no regular file")));
        }
        Ok((file, metadata.len()))
    }

    /// Makes the folder of an object, and the store's own directory, durable.
    fn make_folder(&self, folder: &Path) -> io::Result<()> {
        if folder.is_dir() {
            return Ok(());
        }
        fs::create_dir_all(folder)?;
        let up_to_store = folder.ancestors().skip(1).take_while(|above| above.starts_with(&self.path));
        let above_store = self.path.parent();
        up_to_store.chain(above_store).try_for_each(sync)
    }
}

/// Has the entries of a directory on its disk.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

impl Objects for Directory {
    fn url(&self) -> &str {
        &self.url
    }

    fn put(&self, name: &str, parts: &[&[u8]], existing: Existing) -> Result<(), StoreError> {
        let failed = self.failed(name);
        let place = self.at(name);
        let folder = place.parent().unwrap_or(&self.path).to_owned();
        self.make_folder(&folder).map_err(&failed)?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| failed(io::Error::other(error.to_string())))?;
        let own = self.at(&format!("{name}{PARTIAL}{:016x}", u64::from_le_bytes(random)));
        let written = (|| {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&own)?;
            direct::write(&mut file, parts)?;
            file.sync_all()?;
            let flags = match existing {
                Existing::Replaced => RenameFlags::empty(),
                Existing::Kept => RenameFlags::RENAME_NOREPLACE,
            };
            renameat2(AT_FDCWD, &own, AT_FDCWD, &place, flags)?;
            sync(&folder)
        })();
        written.map_err(|error| {
            let _ = fs::remove_file(&own);
            failed(error)
        })
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let failed = self.failed(name);
        let (file, len) = self.file(name)?;
        if len > MAX_WHOLE {
            return Err(failed(io::Error::other(format!("it has {len} bytes, the most is {MAX_WHOLE}"))));
        }
        let mut bytes = Vec::with_capacity(len as usize);
        file.take(MAX_WHOLE).read_to_end(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    fn read_at(&self, name: &str, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        let (file, len) = self.file(name)?;
        if len < offset + bytes.len() as u64 {
            let why = format!("it has {len} bytes: the rest is lost");
            return Err(self.failed(name)(io::Error::other(why)));
        }
        direct::read(&file, bytes, offset).map_err(self.failed(name))
    }

    fn list(&self, folder: &str) -> Result<Vec<Listed>, StoreError> {
        let listed = entries(&self.at(folder)).map_err(self.failed(folder))?;
        let mut listed: Vec<Listed> = listed
            .into_iter()
            .filter(|(name, _)| !name.contains(PARTIAL))
            .map(|(name, bytes)| Listed { name: format!("{folder}/{name}"), bytes })
            .collect();
        listed.sort_unstable();
        Ok(listed)
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        match fs::remove_file(self.at(name)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(self.failed(name)(error)),
            _ => Ok(()),
        }
    }

    fn tidy(&self, folder: &str) -> Result<(), StoreError> {
        let listed = entries(&self.at(folder)).map_err(self.failed(folder))?;
        let mut partial = listed.iter().filter(|(name, _)| name.contains(PARTIAL));
        partial.try_for_each(|(name, _)| self.delete(&format!("{folder}/{name}")))
    }
}

/// The regular files of a directory with their lengths; none if it is not there.
fn entries(folder: &Path) -> io::Result<Vec<(String, u64)>> {
    let listed = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        listed => listed?,
    };
    let mut found = Vec::new();
    for entry in listed {
        let entry = entry?;
        let metadata = match entry.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            metadata => metadata?,
        };
        if let (true, Ok(name)) = (metadata.is_file(), entry.file_name().into_string()) {
            found.push((name, metadata.len()));
        }
    }
    Ok(found)
}
