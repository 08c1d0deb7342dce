//! Requests for the status, which costs a shard more than other answers do. One text answers all who asked before it
//! was made, and a pause follows.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The pause after a text lasts this many times as long as making it did.
const PAUSE_PER_MAKING: u32 = 3;
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Takes the text to whoever asked.
pub(super) type Answer = Box<dyn FnOnce(&str) + Send>;

/// The requests that wait for the next text.
#[derive(Clone, Default)]
pub(super) struct StatusText(Arc<Mutex<Waiting>>);

#[derive(Default)]
struct Waiting {
    answers: Vec<Answer>,
    /// A thread takes them.
    is_attended: bool,
}

impl StatusText {
    /// Answers with a text that `make` makes after this call. If there is no thread for it, this one makes it.
    pub(super) fn ask(&self, answer: Answer, make: impl Fn() -> String + Send + Sync + 'static) {
        {
            let mut waiting = self.0.lock();
            waiting.answers.push(answer);
            if std::mem::replace(&mut waiting.is_attended, true) {
                return;
            }
        }
        let (this, make) = (self.clone(), Arc::new(make));
        let made = Arc::clone(&make);
        let attend = move || {
            while let Some(answers) = this.next() {
                thread::sleep(pause_after(answered(answers, &*made)));
            }
        };
        if thread::Builder::new().name("status".into()).spawn(attend).is_err() {
            while let Some(answers) = self.next() {
                answered(answers, &*make);
            }
        }
    }

    /// Those that wait. If there are none, nobody attends to them from now on.
    fn next(&self) -> Option<Vec<Answer>> {
        let mut waiting = self.0.lock();
        waiting.is_attended = !waiting.answers.is_empty();
        waiting.is_attended.then(|| std::mem::take(&mut waiting.answers))
    }
}

/// Answers all with one text; returns the time it took.
fn answered(answers: Vec<Answer>, make: &dyn Fn() -> String) -> Duration {
    let begun = Instant::now();
    let text = make();
    for answer in answers {
        answer(&text);
    }
    begun.elapsed()
}

fn pause_after(took: Duration) -> Duration {
    (took * PAUSE_PER_MAKING).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A status of which each text is the number of texts made, and takes as long as the test says.
    struct World {
        status: StatusText,
        made: Arc<AtomicU32>,
        go_on: Sender<()>,
        wait: Arc<Mutex<Receiver<()>>>,
    }

    impl World {
        fn new() -> World {
            let (go_on, wait) = channel();
            World {
                status: StatusText::default(),
                made: Arc::default(),
                go_on,
                wait: Arc::new(Mutex::new(wait)),
            }
        }

        fn ask(&self) -> Receiver<u32> {
            let (answer, answered) = channel();
            let (made, wait) = (Arc::clone(&self.made), Arc::clone(&self.wait));
            let make = move || {
                let number = made.fetch_add(1, Ordering::SeqCst) + 1;
                wait.lock().recv().unwrap();
                number.to_string()
            };
            self.status.ask(Box::new(move |text| answer.send(text.parse().unwrap()).unwrap()), make);
            answered
        }
    }

    #[test]
    fn a_crowd_that_asks_for_the_status_is_answered_at_once_with_what_holds_after_it_asked() {
        let world = World::new();
        let first = world.ask();
        while world.made.load(Ordering::SeqCst) < 1 {
            thread::yield_now();
        }
        let crowd: Vec<_> = (0..100).map(|_| world.ask()).collect();
        world.go_on.send(()).unwrap();
        world.go_on.send(()).unwrap();
        assert_eq!(first.recv().unwrap(), 1);
        assert!(crowd.iter().all(|one| one.recv().unwrap() == 2), "one text, made after all of them asked");
        world.go_on.send(()).unwrap();
        assert_eq!(world.ask().recv().unwrap(), 3, "nobody is left behind");
    }

    #[test]
    fn texts_of_the_status_take_a_part_of_the_time_alone() {
        assert_eq!(pause_after(Duration::from_millis(2)), Duration::from_millis(6));
        assert_eq!(pause_after(Duration::from_secs(2)), LONGEST_PAUSE);
    }
}
