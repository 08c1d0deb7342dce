//! The subject of a snapshot: the model's tensors, the job's settings, and the coordinator's record.

use std::collections::BTreeMap;

use libmodelio::vocabulary::controls::{Controls, SETTINGS};
use libmodelio::vocabulary::dtype::DType;
use libmodelio::vocabulary::layout::ModelLayout;
use libmodelio::wire::ModelRecord;
use serde::{Deserialize, Serialize};

use super::SnapshotError;
use crate::core::JobRecord;

/// All settings, as `control/` shows them.
pub fn settings(controls: &Controls) -> BTreeMap<String, String> {
    let setting = |(name, _): &(&str, String)| Some(((*name).to_owned(), controls.get(name)?));
    SETTINGS.iter().filter_map(setting).collect()
}

/// All of a snapshot but its bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The model's name.
    pub model: String,
    /// The record of the job.
    #[serde(flatten)]
    pub record: JobRecord,
    /// All settings, as `control/` shows them.
    pub settings: BTreeMap<String, String>,
    /// The block size of the model.
    pub block_size: u32,
    /// Name, type and shape of each tensor, as they lie in the model.
    pub tensors: Vec<(String, String, Vec<usize>)>,
    /// `__metadata__` of its files.
    pub metadata: BTreeMap<String, String>,
}

impl Head {
    /// The head for a model and a job.
    pub fn new(
        model: &str,
        layout: &ModelLayout,
        metadata: BTreeMap<String, String>,
        controls: &Controls,
        record: JobRecord,
    ) -> Head {
        let tensors = layout.tensors().iter();
        Head {
            model: model.to_owned(),
            record,
            settings: settings(controls),
            block_size: layout.block_size(),
            tensors: tensors.map(|t| (t.name.clone(), t.dtype.name(), t.shape.clone())).collect(),
            metadata,
        }
    }

    /// The head for the model and the job of these records.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] if the model's record is of none.
    pub fn of(
        model: &ModelRecord,
        record: JobRecord,
        settings: BTreeMap<String, String>,
    ) -> Result<Head, SnapshotError> {
        let layout = model.layout().map_err(|error| SnapshotError::Invalid(error.to_string()))?;
        let tensors = layout.tensors().iter();
        Ok(Head {
            model: model.name.clone(),
            record,
            settings,
            block_size: model.block_size,
            tensors: tensors.map(|t| (t.name.clone(), t.dtype.name(), t.shape.clone())).collect(),
            metadata: model.metadata.clone(),
        })
    }

    /// How the model lies in memory, in blocks of `block_size`.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] if this is no model, or has another order of its tensors.
    pub fn layout(&self, block_size: u32) -> Result<ModelLayout, SnapshotError> {
        let invalid = |error: &dyn std::fmt::Display| SnapshotError::Invalid(error.to_string());
        let tensor = |(name, dtype, shape): &(String, String, Vec<usize>)| {
            let dtype = DType::from_name(dtype).ok_or_else(|| {
                SnapshotError::Invalid(format!("tensor {name:?} is of unknown type {dtype:?}"))
            })?;
            Ok((name.clone(), dtype, shape.clone()))
        };
        let tensors: Vec<_> = self.tensors.iter().map(tensor).collect::<Result<_, SnapshotError>>()?;
        let layout = ModelLayout::new(tensors, block_size).map_err(|error| invalid(&error))?;
        let in_order =
            layout.tensors().iter().zip(&self.tensors).all(|(tensor, (name, ..))| tensor.name == *name);
        if !in_order || self.record.steps.tensors() != layout.tensors().len() as u64 {
            return Err(invalid(&"its tensors and their steps are not those of a model"));
        }
        Ok(layout)
    }

    /// The settings.
    ///
    /// # Errors
    /// [`SnapshotError::Invalid`] names one that no job can have.
    pub fn controls(&self) -> Result<Controls, SnapshotError> {
        let settings = self.settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        Controls::default().with_all(settings).map_err(|error| SnapshotError::Invalid(error.to_string()))
    }

    /// Refuses a snapshot whose tensors are not those of `expected`.
    ///
    /// # Errors
    /// [`SnapshotError::OtherModel`] names the first tensor that is another one.
    pub fn check_model(&self, expected: &ModelLayout) -> Result<(), SnapshotError> {
        let shown = |name: &str, dtype: &str, shape: &[usize]| format!("{name:?} of {dtype} {shape:?}");
        let mut here = self.tensors.iter().map(|(name, dtype, shape)| shown(name, dtype, shape));
        let mut there = expected.tensors().iter().map(|t| shown(&t.name, &t.dtype.name(), &t.shape));
        loop {
            let none = || "no more".to_owned();
            match (here.next(), there.next()) {
                (None, None) => return Ok(()),
                (here, there) if here == there => {}
                (here, there) => {
                    let (here, there) = (here.unwrap_or_else(none), there.unwrap_or_else(none));
                    let why = format!("the next tensor of {} is {here}, expected is {there}", self.model);
                    return Err(SnapshotError::OtherModel(why));
                }
            }
        }
    }
}
