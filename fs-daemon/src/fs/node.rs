//! Inode numbers, and the file that each stands for.
//!
//! Numbers are computed, not handed out: kind, model, index (tensor, directory, setting or learner) and version
//! are packed into 64 bits, so that no table can leak or be looked up. A name that moves with the
//! version (`weights`) leads to another inode for each version, as rename(2) would.

use libmodelio::vocabulary::ids::{LearnerId, Version};

use crate::session::model::MAX_JOINS;

/// Limits of the packing: models of one mount; tensors, directories of tensors, settings and learners of a
/// model.
pub const MAX_MODELS: usize = 1 << MODEL_BITS;

const MODEL_BITS: u32 = 8;
const INDEX_BITS: u32 = 20;
const VERSION_BITS: u32 = 31;

/// One more than the highest number of a publication.
pub const MAX_PUBLICATIONS: u64 = 1 << (INDEX_BITS + VERSION_BITS);

const _: () = assert!(MAX_JOINS <= 1 << INDEX_BITS);

/// The root of the mount, by FUSE's convention.
pub const ROOT_INO: u64 = 1;

/// A file or directory of one model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum File {
    /// `<model>/`.
    Dir,
    /// `weights` of the newest version.
    Weights(Version),
    /// `weights.safetensors` of the newest version.
    Safetensors(Version),
    /// A directory of tensors of the newest version, by number: 0 is `tensors/`.
    Tensors(Version, u32),
    /// `tensors/<name>.npy` of the newest version.
    Tensor(Version, u32),
    /// `gradients` of the mount's own learner.
    Gradients(MapsTo),
    /// `publish`, as looked up this time: one publication.
    Publish(u64),
    /// `device`.
    Device,
    /// `version`.
    VersionText,
    /// `status.json`.
    Status,
    /// `layout`.
    Layout,
    /// `error` of the mount's own learner.
    Error,
    /// `versions/`.
    Versions,
    /// `versions/<n>/`.
    Retained(Version),
    /// `versions/<n>/weights`.
    RetainedWeights(Version),
    /// `versions/<n>/weights.safetensors`.
    RetainedSafetensors(Version),
    /// A directory of tensors of this version, by number: 0 is `versions/<n>/tensors/`.
    RetainedTensors(Version, u32),
    /// `versions/<n>/tensors/<name>.npy`.
    RetainedTensor(Version, u32),
    /// `versions/<n>/version`.
    RetainedText(Version),
    /// `learners/`.
    Learners,
    /// `learners/<id>/`.
    Learner(LearnerId),
    /// `learners/<id>/weights`.
    LearnerWeights(LearnerId, Version),
    /// `learners/<id>/gradients`.
    LearnerGradients(LearnerId, MapsTo),
    /// `learners/<id>/version`.
    LearnerVersion(LearnerId),
    /// `learners/<id>/status`.
    LearnerStatus(LearnerId),
    /// `learners/<id>/error`.
    LearnerError(LearnerId),
    /// `learners/<id>/weight`.
    LearnerWeight(LearnerId),
    /// `snapshot`.
    Snapshot,
    /// `control/`.
    Controls,
    /// `control/<setting>`, by index into the settings.
    Control(u32),
}

/// What mappings of `gradients` lead to. The kernel takes one of these for an inode, so the file has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MapsTo {
    /// The kernel's page cache: msync sends what was stored, and is an fsync. The name leads to this inode.
    PageCache,
    /// The learner's memory: nothing is copied, and the kernel tells nobody of msync. Only an open with O_DIRECT gets here.
    Memory,
}

/// Any inode of the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Node {
    /// The mount's root.
    Root,
    /// `README` in the root.
    Readme,
    /// The trace of the mount, in the root.
    Trace,
    /// In the directory of the model with this index.
    Model(u8, File),
}

const README: u64 = 31;
const TRACE: u64 = 30;

impl File {
    fn parts(self) -> (u64, u32, Version) {
        const NONE: Version = Version(0);
        match self {
            File::Dir => (1, 0, NONE),
            File::Weights(v) => (2, 0, v),
            File::Safetensors(v) => (3, 0, v),
            File::Tensors(v, d) => (4, d, v),
            File::Tensor(v, i) => (5, i, v),
            File::Gradients(maps) => (6, 0, Version(maps as u64)),
            File::Device => (7, 0, NONE),
            File::VersionText => (8, 0, NONE),
            File::Status => (9, 0, NONE),
            // There are no more kinds, and the status has no index.
            File::Layout => (9, 1, NONE),
            File::Versions => (10, 0, NONE),
            File::Retained(v) => (11, 0, v),
            File::RetainedWeights(v) => (12, 0, v),
            File::RetainedSafetensors(v) => (13, 0, v),
            File::RetainedTensors(v, d) => (14, d, v),
            File::RetainedTensor(v, i) => (15, i, v),
            File::RetainedText(v) => (16, 0, v),
            File::Learners => (17, 0, NONE),
            File::Learner(l) => (18, l.0, NONE),
            File::LearnerWeights(l, v) => (19, l.0, v),
            File::LearnerGradients(l, maps) => (20, l.0, Version(maps as u64)),
            File::LearnerVersion(l) => (21, l.0, NONE),
            File::LearnerStatus(l) => (22, l.0, NONE),
            File::Controls => (23, 0, NONE),
            File::Control(i) => (24, i, NONE),
            File::Error => (25, 0, NONE),
            File::LearnerError(l) => (26, l.0, NONE),
            File::LearnerWeight(l) => (29, l.0, NONE),
            File::Snapshot => (27, 0, NONE),
            File::Publish(n) => (28, (n >> VERSION_BITS) as u32, Version(n & ((1 << VERSION_BITS) - 1))),
        }
    }

    fn from_parts(kind: u64, index: u32, version: Version) -> Option<File> {
        let learner = LearnerId(index);
        let maps = if version.0 == 1 { MapsTo::Memory } else { MapsTo::PageCache };
        Some(match kind {
            1 => File::Dir,
            2 => File::Weights(version),
            3 => File::Safetensors(version),
            4 => File::Tensors(version, index),
            5 => File::Tensor(version, index),
            6 => File::Gradients(maps),
            7 => File::Device,
            8 => File::VersionText,
            9 if index == 1 => File::Layout,
            9 => File::Status,
            10 => File::Versions,
            11 => File::Retained(version),
            12 => File::RetainedWeights(version),
            13 => File::RetainedSafetensors(version),
            14 => File::RetainedTensors(version, index),
            15 => File::RetainedTensor(version, index),
            16 => File::RetainedText(version),
            17 => File::Learners,
            18 => File::Learner(learner),
            19 => File::LearnerWeights(learner, version),
            20 => File::LearnerGradients(learner, maps),
            21 => File::LearnerVersion(learner),
            22 => File::LearnerStatus(learner),
            23 => File::Controls,
            24 => File::Control(index),
            25 => File::Error,
            26 => File::LearnerError(learner),
            27 => File::Snapshot,
            29 => File::LearnerWeight(learner),
            28 => File::Publish(u64::from(index) << VERSION_BITS | version.0),
            _ => return None,
        })
    }

    /// The version whose memory this inode shows.
    pub fn version(self) -> Option<Version> {
        match self {
            File::Weights(v)
            | File::Safetensors(v)
            | File::Tensors(v, _)
            | File::Tensor(v, _)
            | File::Retained(v)
            | File::RetainedWeights(v)
            | File::RetainedSafetensors(v)
            | File::RetainedTensors(v, _)
            | File::RetainedTensor(v, _)
            | File::RetainedText(v)
            | File::LearnerWeights(_, v) => Some(v),
            _ => None,
        }
    }

    /// The learner that it is the directory of, or in the directory of.
    pub fn learner(self) -> Option<LearnerId> {
        match self {
            File::Learner(id)
            | File::LearnerWeights(id, _)
            | File::LearnerGradients(id, _)
            | File::LearnerVersion(id)
            | File::LearnerStatus(id)
            | File::LearnerWeight(id)
            | File::LearnerError(id) => Some(id),
            _ => None,
        }
    }

    /// The version that a name of this inode keeps until its buffer is needed: so an open finds what its lookup has found.
    /// A tensor has no need of that: while its name is known its directory keeps the version, and while it is open or
    /// mapped its handle does.
    pub fn names(self) -> Option<Version> {
        match self {
            File::Tensor(..) | File::RetainedTensor(..) => None,
            file => file.version(),
        }
    }

    /// Whether the file's bytes are those of a version's memory: the kernel can read and map that itself.
    pub fn is_flat(self) -> bool {
        matches!(self, File::Weights(_) | File::RetainedWeights(_) | File::LearnerWeights(..))
    }

    /// If the file is `gradients`: what mappings of this inode lead to.
    pub fn maps(self) -> Option<MapsTo> {
        match self {
            File::Gradients(maps) | File::LearnerGradients(_, maps) => Some(maps),
            _ => None,
        }
    }

    /// The same file, with mappings that lead to `maps`.
    pub fn mapping(self, maps: MapsTo) -> File {
        match self {
            File::Gradients(_) => File::Gradients(maps),
            File::LearnerGradients(id, _) => File::LearnerGradients(id, maps),
            file => file,
        }
    }

    /// Whether the node is a directory.
    pub fn is_dir(self) -> bool {
        matches!(
            self,
            File::Dir
                | File::Tensors(..)
                | File::Versions
                | File::Retained(_)
                | File::RetainedTensors(..)
                | File::Learners
                | File::Learner(_)
                | File::Controls
        )
    }
}

impl Node {
    /// Its inode number.
    pub fn ino(self) -> u64 {
        match self {
            Node::Root => ROOT_INO,
            Node::Readme => README << (MODEL_BITS + INDEX_BITS + VERSION_BITS),
            Node::Trace => TRACE << (MODEL_BITS + INDEX_BITS + VERSION_BITS),
            Node::Model(model, file) => {
                let (kind, index, version) = file.parts();
                debug_assert!(index < 1 << INDEX_BITS && version.0 < 1 << VERSION_BITS);
                kind << (MODEL_BITS + INDEX_BITS + VERSION_BITS)
                    | u64::from(model) << (INDEX_BITS + VERSION_BITS)
                    | u64::from(index) << VERSION_BITS
                    | version.0
            }
        }
    }

    /// The node behind a number; `None` for one that was never given out.
    pub fn from_ino(ino: u64) -> Option<Node> {
        if ino == ROOT_INO {
            return Some(Node::Root);
        }
        let kind = ino >> (MODEL_BITS + INDEX_BITS + VERSION_BITS);
        match kind {
            README => return Some(Node::Readme),
            TRACE => return Some(Node::Trace),
            _ => {}
        }
        let model = (ino >> (INDEX_BITS + VERSION_BITS)) as u8;
        let index = (ino >> VERSION_BITS) as u32 & ((1 << INDEX_BITS) - 1);
        let version = Version(ino & ((1 << VERSION_BITS) - 1));
        File::from_parts(kind, index, version).map(|file| Node::Model(model, file))
    }

    /// Whether the file is a directory.
    pub fn is_dir(self) -> bool {
        match self {
            Node::Root => true,
            Node::Readme | Node::Trace => false,
            Node::Model(_, file) => file.is_dir(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_lead_back() {
        let mut seen = std::collections::HashSet::new();
        let mut check = |node: Node| {
            assert_eq!(Node::from_ino(node.ino()), Some(node));
            assert!(seen.insert(node.ino()), "{node:?}");
        };
        check(Node::Root);
        check(Node::Readme);
        check(Node::Trace);
        for model in [0, 1, 255] {
            for kind in 1..=29 {
                for index in [0, 1, (1 << 20) - 1] {
                    for version in [0, 1, (1 << 31) - 1] {
                        let file = File::from_parts(kind, index, Version(version)).unwrap();
                        if file.parts() == (kind, index, Version(version)) {
                            check(Node::Model(model, file));
                        }
                    }
                }
            }
        }
        assert_eq!(Node::from_ino(0), None);
    }
}
