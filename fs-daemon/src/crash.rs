//! A panic ends the whole process, in every build and whichever thread panics.
//!
//! A thread that panics leaves its changes half done, and the other threads would go on with them. Everything
//! around a daemon or a shard is prepared for a crash. So a panic becomes a crash, after the log has said
//! where it was.

use std::io::Write as _;
use std::panic::PanicHookInfo;
use std::process::abort;
use std::thread;

/// From now on a panic is logged and then ends the process by SIGABRT.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        report(panic);
        abort();
    }));
}

fn report(panic: &PanicHookInfo<'_>) {
    let current = thread::current();
    let thread = current.name().unwrap_or("unnamed");
    let message = panic.payload_as_str().unwrap_or("a value that is no text");
    let place = panic.location().map(ToString::to_string).unwrap_or_default();
    // Without a log, as before logging starts, it goes to stderr.
    if tracing::enabled!(tracing::Level::ERROR) {
        tracing::error!(thread, place, "panicked: {message}; the process ends here");
    } else {
        let _ = writeln!(
            std::io::stderr(),
            "gradfs: error: thread {thread} panicked at {place}: {message}; the process ends here"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::panic::catch_unwind;
    use std::process::{Command, Stdio};

    use nix::sys::resource::{Resource, setrlimit};

    use super::*;

    /// Tells this test, run again by itself, to panic; and whether a log is there.
    const ROLE: &str = "GRADFS_TEST_OF_PANIC";

    #[test]
    fn a_panic_in_any_thread_is_logged_and_ends_the_process() {
        if let Ok(role) = std::env::var(ROLE) {
            setrlimit(Resource::RLIMIT_CORE, 0, 0).unwrap();
            if role == "logged" {
                tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
            }
            abort_on_panic();
            let panicking = move || catch_unwind(|| panic!("{} is half changed", role));
            let _ = thread::Builder::new().name("net-7".into()).spawn(panicking).unwrap().join();
            // Reached only if the process has survived.
            std::process::exit(0);
        }
        for (role, line) in
            [("logged", "ERROR gradfs::crash: panicked: logged is half changed"), ("bare", "gradfs: error: ")]
        {
            let output = Command::new(std::env::current_exe().unwrap())
                .args([
                    "crash::tests::a_panic_in_any_thread_is_logged_and_ends_the_process",
                    "--exact",
                    "--nocapture",
                ])
                .env(ROLE, role)
                .env_remove("RUST_BACKTRACE")
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{said}");
            for word in [line, "net-7", file!(), "half changed", "the process ends here"] {
                assert!(said.contains(word), "{word} is missing: {said}");
            }
        }
    }
}
