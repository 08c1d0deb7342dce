//! Inode numbers, and the file that each stands for.
//!
//! Numbers are computed, not handed out: kind, model, index (tensor, directory, setting or learner) and version
//! are packed into 64 bits, so that no table can leak or be looked up. A name that moves with the
//! version (`weights`) leads to another inode for each version, as rename(2) would.

use libmodelio::vocabulary::ids::{LearnerId, ReaderId, Version};
use libmodelio::vocabulary::readers::MAX_READER_ID;

use crate::session::model::MAX_JOINS;

/// Limits of the packing: models of one mount; tensors, directories of tensors, settings and learners of a
/// model.
pub const MAX_MODELS: usize = 1 << MODEL_BITS;

const MODEL_BITS: u32 = 8;
const INDEX_BITS: u32 = 20;
const VERSION_BITS: u32 = 31;

/// One more than the highest number of a publication.
pub const MAX_PUBLICATIONS: u64 = 1 << (INDEX_BITS + VERSION_BITS);

const _: () = assert!(MAX_JOINS <= 1 << INDEX_BITS && MAX_READER_ID <= 1 << INDEX_BITS);

/// Views that a model can have in the life of a mount.
pub const MAX_VIEWS: u32 = 1 << INDEX_BITS;

/// One more than the most versions that a file of changes goes back.
pub const MAX_BACK: u64 = 1 << INDEX_BITS;

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
    /// `durable_version`.
    DurableText,
    /// `status.json`.
    Status,
    /// `settings.json`.
    Settings,
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
    /// `versions/<n>/meta.json`.
    RetainedMeta(Version),
    /// `versions/<n>/changes-since-<m>.safetensors`, by how far back `m` is.
    Sparse(Version, u32),
    /// `versions/<n>/changes-since-<m>.patch`, by how far back `m` is.
    Patch(Version, u32),
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
    /// `learners/<id>/weights.safetensors`.
    LearnerSafetensors(LearnerId, Version),
    /// `learners/<id>/tensors`, which leads to those of the newest version when that has the learner's last step.
    LearnerTensors(LearnerId),
    /// `gradients.safetensors` of the mount's own learner.
    NamedGradients,
    /// `learners/<id>/gradients.safetensors`.
    LearnerNamedGradients(LearnerId),
    /// `publish.safetensors`.
    NamedPublish,
    /// `learners/<id>/publish.safetensors`.
    LearnerNamedPublish(LearnerId),
    /// A file that a program makes beside these four, to be renamed onto one of them.
    Temporary(u64),
    /// `hf/`.
    HuggingFace,
    /// `versions/<n>/hf/`.
    RetainedHuggingFace(Version),
    /// A file of these two that came with the model, by index.
    Companion(u32),
    /// `learners/<id>/all_reduce`.
    LearnerAllReduce(LearnerId),
    /// `readers/`.
    Readers,
    /// `readers/applied`.
    ReadersApplied,
    /// `readers/<id>/`.
    Reader(ReaderId),
    /// `readers/<id>/staged`.
    ReaderStaged(ReaderId),
    /// `readers/<id>/applied`.
    ReaderApplied(ReaderId),
    /// `views/`.
    Views,
    /// `views/<name>/`, by number.
    View(u32),
    /// `views/<name>/plan`, by number.
    ViewPlan(u32),
    /// `views/<name>/set`, of the model that the plan makes.
    Set,
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

/// The kinds of nodes, as the kernel has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A directory.
    Dir,
    /// A regular file.
    File,
    /// A symbolic link.
    Link,
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

/// Files of which a model has one each.
const OF_MODEL: [File; 21] = [
    File::Dir,
    File::Device,
    File::VersionText,
    File::Status,
    File::Layout,
    File::Versions,
    File::Learners,
    File::Controls,
    File::Error,
    File::Snapshot,
    File::Gradients(MapsTo::PageCache),
    File::Gradients(MapsTo::Memory),
    File::NamedGradients,
    File::NamedPublish,
    File::HuggingFace,
    File::Settings,
    File::Readers,
    File::ReadersApplied,
    File::Views,
    File::Set,
    File::DurableText,
];
/// Files of which a version has one each.
const OF_VERSION: [fn(Version) -> File; 8] = [
    File::Weights,
    File::Safetensors,
    File::Retained,
    File::RetainedWeights,
    File::RetainedSafetensors,
    File::RetainedText,
    File::RetainedHuggingFace,
    File::RetainedMeta,
];
/// Files of which a learner has one each.
const OF_LEARNER: [fn(LearnerId) -> File; 11] = [
    File::Learner,
    |id| File::LearnerGradients(id, MapsTo::PageCache),
    |id| File::LearnerGradients(id, MapsTo::Memory),
    File::LearnerVersion,
    File::LearnerStatus,
    File::LearnerError,
    File::LearnerWeight,
    File::LearnerTensors,
    File::LearnerNamedGradients,
    File::LearnerNamedPublish,
    File::LearnerAllReduce,
];
/// Files of which a reader has one each.
const OF_READER: [fn(ReaderId) -> File; 3] = [File::Reader, File::ReaderStaged, File::ReaderApplied];

impl File {
    fn parts(self) -> (u64, u32, Version) {
        const NONE: Version = Version(0);
        let wide = |n: u64| ((n >> VERSION_BITS) as u32, Version(n & ((1 << VERSION_BITS) - 1)));
        match self {
            File::LearnerWeights(l, v) => (4, l.0, v),
            File::LearnerSafetensors(l, v) => (5, l.0, v),
            File::Tensors(v, d) => (6, d, v),
            File::Tensor(v, i) => (7, i, v),
            File::RetainedTensors(v, d) => (8, d, v),
            File::RetainedTensor(v, i) => (9, i, v),
            File::Control(i) => (10, i, NONE),
            File::Companion(i) => (10, i, Version(1)),
            File::View(i) => (10, i, Version(2)),
            File::ViewPlan(i) => (10, i, Version(3)),
            File::Publish(n) => (11, wide(n).0, wide(n).1),
            File::Temporary(n) => (12, wide(n).0, wide(n).1),
            File::Sparse(v, back) => (13, back, v),
            File::Patch(v, back) => (14, back, v),
            file => {
                if let Some(at) = OF_MODEL.iter().position(|of| *of == file) {
                    return (1, at as u32, NONE);
                }
                if let Some(v) = file.version()
                    && let Some(at) = OF_VERSION.iter().position(|of| of(v) == file)
                {
                    return (2, at as u32, v);
                }
                let of_reader = |id| OF_READER.iter().position(|of| of(id) == file).map(|at| (id, at));
                if let Some((id, at)) = file.reader().and_then(of_reader) {
                    return (15, id.0, Version(at as u64));
                }
                let of_learner = |id| OF_LEARNER.iter().position(|of| of(id) == file).map(|at| (id, at));
                let found = file.learner().and_then(of_learner);
                debug_assert!(found.is_some(), "{file:?} is in no table");
                let (id, at) = found.unwrap_or((LearnerId(0), 0));
                (3, id.0, Version(at as u64))
            }
        }
    }

    fn from_parts(kind: u64, index: u32, version: Version) -> Option<File> {
        let learner = LearnerId(index);
        let wide = u64::from(index) << VERSION_BITS | version.0;
        Some(match kind {
            1 if version.0 == 0 => *OF_MODEL.get(index as usize)?,
            2 => OF_VERSION.get(index as usize)?(version),
            3 => OF_LEARNER.get(version.0 as usize)?(learner),
            4 => File::LearnerWeights(learner, version),
            5 => File::LearnerSafetensors(learner, version),
            6 => File::Tensors(version, index),
            7 => File::Tensor(version, index),
            8 => File::RetainedTensors(version, index),
            9 => File::RetainedTensor(version, index),
            10 if version.0 == 0 => File::Control(index),
            10 if version.0 == 1 => File::Companion(index),
            10 if version.0 == 2 => File::View(index),
            10 if version.0 == 3 => File::ViewPlan(index),
            11 => File::Publish(wide),
            12 => File::Temporary(wide),
            13 => File::Sparse(version, index),
            14 => File::Patch(version, index),
            15 => OF_READER.get(version.0 as usize)?(ReaderId(index)),
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
            | File::RetainedMeta(v)
            | File::Sparse(v, _)
            | File::Patch(v, _)
            | File::RetainedHuggingFace(v)
            | File::LearnerWeights(_, v)
            | File::LearnerSafetensors(_, v) => Some(v),
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
            | File::LearnerSafetensors(id, _)
            | File::LearnerTensors(id)
            | File::LearnerNamedGradients(id)
            | File::LearnerNamedPublish(id)
            | File::LearnerAllReduce(id)
            | File::LearnerError(id) => Some(id),
            _ => None,
        }
    }

    /// The reader that it is the directory of, or in the directory of.
    pub fn reader(self) -> Option<ReaderId> {
        match self {
            File::Reader(id) | File::ReaderStaged(id) | File::ReaderApplied(id) => Some(id),
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

    /// Whether the file is written by tensors' names.
    pub fn is_named(self) -> bool {
        matches!(
            self,
            File::NamedGradients
                | File::LearnerNamedGradients(_)
                | File::NamedPublish
                | File::LearnerNamedPublish(_)
        )
    }

    /// Whether the file shows what has changed.
    pub fn is_changes(self) -> bool {
        matches!(self, File::Sparse(..) | File::Patch(..))
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
                | File::Readers
                | File::Reader(_)
                | File::Controls
                | File::Views
                | File::View(_)
                | File::HuggingFace
                | File::RetainedHuggingFace(_)
        )
    }
}

impl Node {
    /// Its kind, as the kernel has it.
    pub fn kind(self) -> FileKind {
        match self {
            Node::Model(_, File::LearnerTensors(_)) => FileKind::Link,
            node if node.is_dir() => FileKind::Dir,
            _ => FileKind::File,
        }
    }

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
            for kind in 1..=15 {
                for index in (0..20).chain([(1 << 20) - 1]) {
                    for version in (0..20).chain([(1 << 31) - 1]) {
                        if let Some(file) = File::from_parts(kind, index, Version(version)) {
                            assert_eq!(file.parts(), (kind, index, Version(version)), "{file:?}");
                            check(Node::Model(model, file));
                        }
                    }
                }
            }
        }
        assert_eq!(Node::from_ino(0), None);
    }
}
