//! Opens of `gradients` that ask for its memory. The name leads to the inode that maps to the page cache, so they are sent
//! back to look the name up again, and find the memory's inode then.

use std::collections::HashMap;
use std::time::Instant;

use parking_lot::Mutex;

use super::second_lookups::{MAX_LOOKS, MAX_PAUSE};

/// Threads that are on their way from one inode to another.
///
/// The kernel may look a name up twice before it opens what it has found. So a thread is led until it has arrived.
#[derive(Default)]
pub struct MemoryLookups(Mutex<HashMap<u32, Led>>);

struct Led {
    from: u64,
    to: u64,
    at: Instant,
}

impl MemoryLookups {
    /// `tid` is to find `to` where its lookup finds `from`. False if it cannot be led: it is not seen, or too many are.
    pub fn lead(&self, tid: u32, from: u64, to: u64) -> bool {
        if tid == 0 {
            return false;
        }
        let mut led = self.0.lock();
        if led.len() >= MAX_LOOKS {
            led.retain(|_, led| led.at.elapsed() < MAX_PAUSE);
        }
        let has_room = led.len() < MAX_LOOKS;
        if has_room {
            led.insert(tid, Led { from, to, at: Instant::now() });
        }
        has_room
    }

    /// The inode that `tid` finds where `ino` is.
    pub fn led(&self, tid: u32, ino: u64) -> u64 {
        let led = self.0.lock();
        let its = led.get(&tid).filter(|led| led.from == ino && led.at.elapsed() < MAX_PAUSE);
        its.map_or(ino, |led| led.to)
    }

    /// `tid` opens what it has found.
    pub fn arrived(&self, tid: u32) {
        self.0.lock().remove(&tid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_led_to_the_memory_until_it_opens_it() {
        let lookups = MemoryLookups::default();
        assert_eq!(lookups.led(7, 5), 5);
        assert!(lookups.lead(7, 5, 6));
        assert_eq!([(7, 5), (7, 5), (7, 4), (8, 5)].map(|(tid, ino)| lookups.led(tid, ino)), [6, 6, 4, 5]);
        lookups.arrived(7);
        assert_eq!(lookups.led(7, 5), 5);
        assert!(!lookups.lead(0, 5, 6), "threads of other namespaces are not told apart");
    }
}
