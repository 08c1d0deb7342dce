//! What files of a mount tell in text, and how settings are changed.

use std::ffi::{c_char, c_int};
use std::sync::Arc;

use libmodelio::formats::layout::layout_text;
use libmodelio::vocabulary::controls::SETTINGS;
use libmodelio::vocabulary::layout::header;
use libmodelio::vocabulary::settings_json::{self, SETTINGS_JSON};
use libmodelio::vocabulary::weight::Weight;
use libmodelio::{Job, Version, wait_for};
use nix::errno::Errno;
use serde_json::json;

use crate::handles::{Handle, either, get};
use crate::learner::Learner;
use crate::model::Model;
use crate::outcome::{Failure, Outcome, answer, done, string, timeout};
use crate::publication::Publication;

fn no_file(name: &str) -> Failure {
    Failure::new(Errno::ENOENT, format!("there is no file {name:?}"))
}

fn of_model(model: &Model, name: &str) -> Outcome<String> {
    let job = &model.job;
    Ok(match name {
        "layout" => layout_text(job.layout().tensors()),
        "name" => job.model().to_owned(),
        "version" => format!("{}\n", job.offered_version()),
        "header" => {
            let header = header::header_bytes(job.layout().tensors(), &Default::default());
            String::from_utf8_lossy(header.get(8..).unwrap_or_default()).into_owned()
        }
        "control" => SETTINGS.iter().map(|(name, _)| format!("{name}\n")).collect(),
        "status.json" => status(model),
        "error" => String::new(),
        name if name.starts_with("versions/") => meta(job, name).ok_or_else(|| no_file(name))?,
        name => {
            let text = setting_of(name).and_then(|setting| settings_json::get(&job.controls(), setting));
            format!("{}\n", text.ok_or_else(|| no_file(name))?)
        }
    })
}

/// The setting that a file shows.
fn setting_of(name: &str) -> Option<&str> {
    if name == SETTINGS_JSON {
        return Some(name);
    }
    name.strip_prefix("control/").filter(|setting| *setting != SETTINGS_JSON)
}

/// `versions/<n>/meta.json` of a version that is here.
fn meta(job: &Job, name: &str) -> Option<String> {
    let version = Version(name.strip_prefix("versions/")?.strip_suffix("/meta.json")?.parse().ok()?);
    job.get(version).map(|_| format!("{}\n", job.meta(version)))
}

fn of_learner(learner: &Learner, name: &str) -> Outcome<String> {
    let id = learner.contributor.learner();
    Ok(match name {
        "name" => learner.name.clone(),
        "error" if learner.refusal.lock().is_empty() => String::new(),
        "error" => format!("{}\n", learner.refusal.lock()),
        "weight" => format!("{}\n", learner.contributor.weight()),
        "status" => {
            let status = learner.model.job.status();
            let member = status.members.iter().find(|member| member.learner == id);
            let left = || Failure::new(Errno::ENOTCONN, "the learner is no longer in the job: join again");
            let member = member.ok_or_else(left)?;
            format!(
                "id: {}\nincarnation: {}\nstep: {}\nphase: {}\nopen_bytes: {}\njob: {}\n",
                member.name,
                member.incarnation,
                member.step,
                member.phase,
                learner.contributor.open_bytes(),
                status.state
            )
        }
        _ => return of_model(&learner.model, name),
    })
}

/// What a mount's `status.json` has of the job, under the same names.
fn status(model: &Model) -> String {
    let (job, status) = (&model.job, model.job.status());
    let learners = status.members.iter().map(|member| {
        json!({
            "id": member.name, "incarnation": member.incarnation, "step": member.step, "phase": member.phase,
            "joined_at_version": member.joined_at,
        })
    });
    let shards = status.shards.iter().map(|shard| {
        json!({
            "id": shard.shard, "address": shard.address, "transport": shard.transport.to_string(),
            "blocks": shard.blocks, "connected": shard.connected,
        })
    });
    let controls = job.controls();
    json!({
        "model": job.model(),
        "state": status.state.name(),
        "version": status.version,
        "size_bytes": job.layout().size(),
        "tensors": job.layout().tensors().len(),
        "block_size": job.layout().block_size(),
        "blocks": job.layout().blocks(),
        "transport": job.kind().to_string(),
        "shards": shards.collect::<Vec<_>>(),
        "learners": learners.collect::<Vec<_>>(),
        "committed_for_next_version": status.committed,
        "contributions": status.contributions,
        "contributions_of_newest_version": status.newest_of,
        "learning_rate": controls.learning_rate_after(status.version),
        "versions_in_memory": status.versions,
        "version_buffers": {"existing": status.buffers.0, "free": status.buffers.1, "no_memory": job.shortage()},
        "control": settings_json::all_of(&controls),
    })
    .to_string()
}

/// Copies the text of a file of the model, and of a learner, as a mount has it: "layout", "version", "status.json",
/// "settings.json", "control/learning_rate", "control" (the names of all settings, a line each), "name", "header"
/// (safetensors' JSON), "versions/N/meta.json" of a version that is held; and of a learner also "status", "error" and
/// "weight". The text has no zero at its end unless there is room for one.
///
/// Returns the length of the text, of which as much was copied as `size` allows, or -ENOENT.
///
/// # Safety
/// `file` is a string, and `buffer` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_get(
    model_or_learner: Handle,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> isize {
    let text = either::<Model, Learner>(model_or_learner, "model or learner").and_then(|of| {
        // SAFETY: the caller's promise.
        let name = unsafe { string(file, "the file") }?;
        of.map_or_else(|learner| of_learner(&learner, name), |model| of_model(&model, name))
    });
    answer(text.map(|text| {
        let len = text.len().min(if buffer.is_null() { 0 } else { size });
        // SAFETY: the caller's promise, and the text is another memory.
        unsafe { buffer.copy_from_nonoverlapping(text.as_ptr().cast(), len) };
        if len < size && !buffer.is_null() {
            // SAFETY: there is room for one more.
            unsafe { buffer.add(len).write(0) };
        }
        text.len()
    }))
}

/// Writes the text of a file. Of a model, "control/NAME" sets a setting of the whole job, and "settings.json" those that its
/// object names, all or none. Of a learner, "weight" is how much its contributions count from the next one on. Of a
/// publication, "user.NAME" is said of the version that it makes. When it has returned 0, the value holds.
///
/// -ENOENT for another file, -EINVAL for a value that does not fit and for another name of a publication, -ETIMEDOUT if it
/// is not known in time whether it was taken.
///
/// # Safety
/// `file` and `value` are strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn modelio_set(
    model_learner_or_publication: Handle,
    file: *const c_char,
    value: *const c_char,
    timeout_ms: u32,
) -> c_int {
    // SAFETY: the caller's promises.
    done(unsafe { string(file, "the file") }.and_then(|name| {
        // SAFETY: as above.
        let value = unsafe { string(value, "the value") }?;
        if let Ok(publication) = get::<Publication>(model_learner_or_publication, "publication") {
            return publication.describe(name, value);
        }
        let of = either::<Model, Learner>(model_learner_or_publication, "model, learner or publication")?;
        match of {
            Err(learner) if name == "weight" => {
                let wrong = |error| Failure::invalid(format!("weight {value:?}: {error}"));
                let weight: Weight = value.trim().parse().map_err(wrong)?;
                Ok(learner.contributor.set_weight(weight)?)
            }
            of => {
                let model = of.unwrap_or_else(|learner| Arc::clone(&learner.model));
                let setting = setting_of(name).ok_or_else(|| no_file(name))?;
                let patience = timeout(timeout_ms);
                Ok(wait_for(patience, |done| model.job.set_control(setting, value, patience, done))?)
            }
        }
    }))
}
