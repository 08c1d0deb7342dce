//! The names that clients open, and what they stand for:
//!
//! | name | face |
//! |---|---|
//! | `<model>` | reads weights, writes gradients of the own learner; with reducer `assign` a disk |
//! | `<model>/weights` | the version that is newest when it is opened |
//! | `<model>/weights@follow` | the version that is newest, as of the last FLUSH |
//! | `<model>@<n>` | a version that is still there |
//! | `<model>/gradients` | writes gradients of the own learner |
//! | `<model>/learners/<id>` | reads weights, writes gradients of this learner |
//!
//! With one model, the empty name is its weights, too. A learner that is not in the job joins with the first write: who
//! looks at an export, or reads it, keeps nobody waiting.

use std::sync::Arc;

use libmodelio::nbd::numbers::transmission;
use libmodelio::nbd::{Export, Exports};
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::members::is_learner_name;

use super::face::{Face, Following, LearnerFace};
use crate::session::disk::OpenDisk;
use crate::session::error::CallError;
use crate::session::model::Model;
use libmodelio::reader::Reader;

const ALL: u16 = transmission::HAS_FLAGS | transmission::SEND_FLUSH | transmission::SEND_CACHE;
/// Of exports that are read: a reader may ask for all of a range in one piece.
const READS: u16 = ALL | transmission::SEND_DF;
/// Of exports that are written: a write may end a step.
const WRITES: u16 = ALL | transmission::SEND_FUA;
/// Of disks: all connections see what any has written, and a FLUSH is for the writes of all.
const DISK: u16 =
    READS | WRITES | transmission::SEND_TRIM | transmission::SEND_WRITE_ZEROES | transmission::CAN_MULTI_CONN;

/// The models that a mount shows at this moment.
pub type Models = Box<dyn Fn() -> Vec<Arc<Model>> + Send + Sync>;

/// The exports of these models.
pub struct ModelExports {
    models: Models,
}

/// The meaning of a name.
#[derive(Clone, Copy)]
enum ExportKind<'a> {
    Device,
    Disk,
    Newest,
    Following,
    Numbered(Version),
    Gradients,
    Learner(&'a str),
}

impl ModelExports {
    /// Exports of `models`.
    pub fn new(models: Models) -> ModelExports {
        ModelExports { models }
    }

    /// Whether opening an export may take long: a version must come, or memory must be taken.
    pub fn takes_long(&self, name: &str) -> bool {
        match self.kind(name) {
            Some((_, ExportKind::Disk)) => true,
            Some((
                model,
                ExportKind::Newest | ExportKind::Following | ExportKind::Device | ExportKind::Learner(_),
            )) => model.is_behind(),
            Some((_, ExportKind::Numbered(_) | ExportKind::Gradients)) | None => false,
        }
    }

    /// Opens an export. Waits for the job's answer if it [takes long](Self::takes_long).
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub fn open(&self, name: &str) -> Result<Face, CallError> {
        let gone = |why: &str| CallError::new(libc::ENOENT, why);
        let (model, kind) = self.kind(name).ok_or_else(|| gone("there is no such export any more"))?;
        let model = &model;
        let newest = || model.open_newest();
        // Nothing tells a client of block devices from which version, or replica, it begins.
        if matches!(kind, ExportKind::Gradients | ExportKind::Device | ExportKind::Learner(_))
            && model.job.content().is_weights()
        {
            let what = format!("reducer {} takes models, which are written as files", model.job.reducer().0);
            return Err(CallError::new(libc::EACCES, what));
        }
        let (name, reader) = match kind {
            ExportKind::Newest => return Ok(Face::Version(Arc::new(newest()?))),
            ExportKind::Following => return Ok(Face::Following(Following::new(model, newest()?).into())),
            ExportKind::Disk => return Ok(Face::Disk(OpenDisk::open(model)?.into())),
            ExportKind::Numbered(version) => {
                model.refuse_reader(version)?;
                let why = "this version is gone (control/retain keeps more of them)";
                let reader = Reader::open(&model.job, version).ok_or_else(|| gone(why))?;
                return Ok(Face::Version(Arc::new(reader)));
            }
            ExportKind::Gradients => (&*model.own_name, None),
            ExportKind::Device => (&*model.own_name, Some(newest()?)),
            ExportKind::Learner(name) => (name, Some(newest()?)),
        };
        Ok(Face::Learner(Arc::new(LearnerFace::new(model, name, reader))))
    }

    fn kind<'a>(&self, name: &'a str) -> Option<(Arc<Model>, ExportKind<'a>)> {
        let models = (self.models)();
        let model = |name: &str| models.iter().find(|model| model.name == name).cloned();
        if let ("", [only]) = (name, &models[..]) {
            return Some((Arc::clone(only), ExportKind::Newest));
        }
        if let Some(device) = model(name) {
            let kind = if device.is_disk() { ExportKind::Disk } else { ExportKind::Device };
            return Some((device, kind));
        }
        if let Some((of, learner)) = name.split_once("/learners/") {
            return is_learner_name(learner).then_some((model(of)?, ExportKind::Learner(learner)));
        }
        if let Some(of) = name.strip_suffix("/weights") {
            return Some((model(of)?, ExportKind::Newest));
        }
        if let Some(of) = name.strip_suffix("/weights@follow") {
            return Some((model(of)?, ExportKind::Following));
        }
        if let Some(of) = name.strip_suffix("/gradients") {
            return Some((model(of)?, ExportKind::Gradients));
        }
        let (of, number) = name.rsplit_once('@')?;
        // "+3" and "03" are no versions, though `parse` would take them as numbers.
        let version = number.parse().ok().filter(|version: &u64| version.to_string() == number)?;
        Some((model(of)?, ExportKind::Numbered(Version(version))))
    }

    fn described(name: String, model: &Model, kind: ExportKind<'_>) -> Export {
        let of = &model.name;
        let (description, flags) = match kind {
            ExportKind::Device => (format!("model {of}: read weights, write gradients"), READS | WRITES),
            ExportKind::Disk => (format!("model {of} as a disk: FLUSH publishes a version"), DISK),
            ExportKind::Newest => (format!("newest version of model {of}"), READS | transmission::READ_ONLY),
            ExportKind::Following => {
                let description = format!("newest version of model {of}, a newer one after each FLUSH");
                (description, READS | transmission::READ_ONLY)
            }
            // All connections read the same bytes.
            ExportKind::Numbered(version) => (
                format!("version {version} of model {of}"),
                READS | transmission::READ_ONLY | transmission::CAN_MULTI_CONN,
            ),
            ExportKind::Gradients => (format!("gradients of model {of}, write only"), WRITES),
            ExportKind::Learner(learner) => {
                (format!("learner {learner} of model {of}: read weights, write gradients"), READS | WRITES)
            }
        };
        Export { name, description, size: model.layout.size(), flags, preferred: model.layout.block_size() }
    }
}

impl Exports for ModelExports {
    fn list(&self) -> Vec<Export> {
        let mut all = Vec::new();
        for model in &(self.models)() {
            let name = &model.name;
            let whole = if model.is_disk() { ExportKind::Disk } else { ExportKind::Device };
            all.push(Self::described(name.clone(), model, whole));
            all.push(Self::described(format!("{name}/weights"), model, ExportKind::Newest));
            all.push(Self::described(format!("{name}/weights@follow"), model, ExportKind::Following));
            all.push(Self::described(format!("{name}/gradients"), model, ExportKind::Gradients));
            for learner in model.learners().iter().filter(|learner| learner.name != model.own_name) {
                let kind = ExportKind::Learner(&learner.name);
                all.push(Self::described(format!("{name}/learners/{}", learner.name), model, kind));
            }
            for version in model.job.versions() {
                all.push(Self::described(format!("{name}@{version}"), model, ExportKind::Numbered(version)));
            }
        }
        all
    }

    fn find(&self, name: &str) -> Option<Export> {
        let (model, kind) = self.kind(name)?;
        match kind {
            ExportKind::Numbered(version) if !model.job.versions().contains(&version) => None,
            kind => Some(Self::described(name.to_owned(), &model, kind)),
        }
    }
}
