//! sigaction(2): the actions of signals, which a process inherits from whoever has started it.

use std::io;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// Gives a signal its default action.
///
/// # Errors
/// Fails with the error of sigaction(2).
pub fn default_action(signal: Signal) -> io::Result<()> {
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: the default action runs no code of this process.
    unsafe { sigaction(signal, &default) }?;
    Ok(())
}
