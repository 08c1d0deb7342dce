//! Owners and modes of the files. The kernel decides by them who may do what (`default_permissions`).

/// The owner of the files in the mount, except of learners that others have made, and who else may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User and group.
    pub owner: Owner,
    /// Permission bits that are taken away from what each kind of file could have; `None` for the modes of a mount that
    /// only its owner writes to.
    pub umask: Option<u16>,
}

/// User and group of a file.
pub type Owner = (u32, u32);

/// The uses of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A directory in which nothing can be made.
    Dir,
    /// The directory in which learners are made and removed.
    Learners,
    /// Programs only read it.
    Read,
    /// Everybody may read it. A program that may write it changes the job for all.
    Shared,
    /// Contributions and publications.
    Contribute,
    /// Its owner reads it.
    Owner,
}

impl Access {
    /// The permission bits of a file.
    pub fn mode(&self, file: Use) -> u16 {
        let Some(umask) = self.umask else {
            return match file {
                Use::Dir | Use::Learners => 0o755,
                Use::Read => 0o444,
                Use::Shared => 0o644,
                Use::Contribute => 0o600,
                Use::Owner => 0o400,
            };
        };
        let bits = match file {
            Use::Dir => 0o755,
            // The mask decides who makes learners.
            Use::Learners => 0o777,
            Use::Read => 0o444,
            Use::Shared | Use::Contribute => 0o666,
            Use::Owner => 0o400,
        };
        let mode = bits & !umask;
        // As in /tmp: a user who makes learners removes only their own.
        if file == Use::Learners && mode & 0o022 != 0 { mode | 0o1000 } else { mode }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_opens_what_is_written_and_nothing_else() {
        let modes = |umask| {
            let access = Access { owner: (0, 0), umask };
            [Use::Dir, Use::Learners, Use::Read, Use::Shared, Use::Contribute, Use::Owner]
                .map(|file| access.mode(file))
        };
        assert_eq!(modes(None), [0o755, 0o755, 0o444, 0o644, 0o600, 0o400]);
        assert_eq!(modes(Some(0)), [0o755, 0o1777, 0o444, 0o666, 0o666, 0o400]);
        assert_eq!(modes(Some(0o027)), [0o750, 0o750, 0o440, 0o640, 0o640, 0o400]);
        assert_eq!(modes(Some(0o007)), [0o750, 0o1770, 0o440, 0o660, 0o660, 0o400]);
    }
}
