//! Writing `control/*`: one value a file, set for the whole job.

use std::sync::atomic::Ordering;

use libmodelio::vocabulary::controls::SETTINGS;
use ps_backend::job::SetError;

use super::errno::{FsError, FsResult};
use super::handle::TextHandle;
use super::model::Model;
use super::waits::Asked;
use super::{Caller, Done, Fs};

/// Longest value of a setting.
const MAX_SETTING: usize = 4096;

impl Fs {
    /// Writes a setting. Its caller is not kept waiting for the job's answer when it is asked to end.
    pub(super) fn set(&self, text: &TextHandle, offset: u64, data: &[u8], caller: Caller, done: Done<()>) {
        // Whatever comes of it: closing does not empty the setting any more.
        text.emptied.store(false, Ordering::Relaxed);
        let (model, name, value) = match setting(text, offset, data) {
            Ok(parts) => parts,
            Err(error) => return done(Err(error)),
        };
        let done = self.waits.guard(caller, done, Asked::Answer, |()| {});
        let (of_done, written) = (model.name.clone(), value.trim().to_owned());
        let answer = move |outcome| match outcome {
            Ok(()) => {
                tracing::info!(model = of_done, setting = name, value = written, "set");
                done(Ok(()));
            }
            Err(SetError::Refused(error)) => done(Err(unfit(name, &error.without_name()))),
            Err(SetError::Unanswered(error)) => done(Err(error.into())),
        };
        model.job.set_control(name, value, model.prompt(), Box::new(answer));
    }
}

/// Which setting of which model is written, and the text it is to have.
fn setting<'a>(
    text: &'a TextHandle,
    offset: u64,
    data: &'a [u8],
) -> FsResult<(&'a Model, &'static str, &'a str)> {
    let (Some(index), Some(model)) = (text.control(), &text.model) else {
        return Err(FsError::new(libc::EBADF, "not open for writing"));
    };
    let (name, _) = SETTINGS.get(index as usize).ok_or_else(FsError::not_found)?;
    if offset != 0 || data.len() > MAX_SETTING {
        return Err(unfit(name, "write the whole value at once"));
    }
    let value = std::str::from_utf8(data).map_err(|_| unfit(name, "not text"))?;
    Ok((model, name, value))
}

fn unfit(name: &str, why: &str) -> FsError {
    FsError::new(libc::EINVAL, format!("control/{name}: {why}"))
}
