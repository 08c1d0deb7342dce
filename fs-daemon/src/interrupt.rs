//! Signals that a command of some length looks at, so that it ends in order.

use std::sync::{Arc, OnceLock};

use crate::error::Error;
use crate::signals;

/// Whether a signal has come. A second signal ends the process at once.
pub struct Interrupt(Arc<OnceLock<String>>);

impl Interrupt {
    /// To be called before there are threads.
    pub fn install() -> Result<Interrupt, Error> {
        let stops = signals::install()?;
        let why = Arc::new(OnceLock::new());
        let cause = Arc::clone(&why);
        let waits = move || drop(cause.set(stops.wait().to_string()));
        let spawned = std::thread::Builder::new().name("interrupt".into()).spawn(waits);
        spawned.map_err(|error| Error::new("cannot start a thread for signals").caused_by(error))?;
        Ok(Interrupt(why))
    }

    pub fn why(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }
}
