//! Two ends that answer each other, and threads that put words in at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Notes what it hears, and answers each request above 0 with the one below it.
#[derive(Default)]
struct Ear {
    /// Itself, and whom it answers.
    answers: Option<(End, End)>,
    mailbox: OnceLock<Arc<Mailbox>>,
    heard: Mutex<Vec<u64>>,
    /// Calls that are under way, of both ends.
    under_way: Arc<AtomicUsize>,
}

impl Hears for Ear {
    fn hears(self: Arc<Self>, from: End, word: Word) {
        assert_eq!(self.under_way.fetch_add(1, Ordering::SeqCst), 0, "called from another end's stack");
        let Word::Says(request, Message::Done) = word else { panic!("{word:?}") };
        self.heard.lock().push(request);
        if let (Some((own, other)), Some(mailbox), true) = (self.answers, self.mailbox.get(), request > 0) {
            assert_eq!(from, other);
            mailbox.put(own, other, Word::Says(request - 1, Message::Done));
            mailbox.drain();
        }
        self.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A mailbox with its two ends; `answers` if they answer each other.
fn ends(answers: bool) -> (Arc<Mailbox>, [Arc<Ear>; 2]) {
    let under_way = Arc::new(AtomicUsize::new(0));
    let ends = [(End::Coordinator, End::Partition), (End::Partition, End::Coordinator)].map(|pair| {
        let under_way = Arc::clone(&under_way);
        Arc::new(Ear { answers: answers.then_some(pair), under_way, ..Ear::default() })
    });
    let weak = |end: &Arc<Ear>| -> Weak<dyn Hears> { Arc::downgrade(end) as Weak<dyn Hears> };
    let mailbox = Arc::new(Mailbox::new(weak(&ends[0]), weak(&ends[1])));
    for end in &ends {
        assert!(end.mailbox.set(Arc::clone(&mailbox)).is_ok());
    }
    (mailbox, ends)
}

#[test]
fn who_answers_is_not_called_from_the_stack_of_who_asks() {
    const ROUNDS: u64 = 100_000;
    let (mailbox, [coordinator, partition]) = ends(true);
    mailbox.put(End::Coordinator, End::Partition, Word::Says(ROUNDS, Message::Done));
    mailbox.drain();
    let down = |from: u64| (0..=from).rev().step_by(2).collect::<Vec<u64>>();
    assert_eq!(*partition.heard.lock(), down(ROUNDS));
    assert_eq!(*coordinator.heard.lock(), down(ROUNDS - 1));
}

#[test]
fn words_of_many_threads_come_once_each_and_in_their_order() {
    const THREADS: u64 = 8;
    const WORDS: u64 = 5_000;
    let (mailbox, [coordinator, partition]) = ends(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mailbox = &mailbox;
            scope.spawn(move || {
                for word in 0..WORDS {
                    let to = if word % 3 == 0 { End::Coordinator } else { End::Partition };
                    mailbox.put(End::Client, to, Word::Says(thread << 32 | word, Message::Done));
                    mailbox.drain();
                }
            });
        }
    });
    for (end, is_its_own) in [(&coordinator, true), (&partition, false)] {
        let heard = end.heard.lock();
        for thread in 0..THREADS {
            let of_thread = heard.iter().filter(|word| *word >> 32 == thread).map(|word| word & 0xffff_ffff);
            let expected = (0..WORDS).filter(|word| (word % 3 == 0) == is_its_own);
            assert!(of_thread.eq(expected), "thread {thread}, {is_its_own}");
        }
    }
}

#[test]
fn words_to_an_end_that_is_gone_are_lost() {
    let (mailbox, [coordinator, partition]) = ends(false);
    drop(partition);
    mailbox.put(End::Client, End::Partition, Word::Says(1, Message::Done));
    mailbox.put(End::Partition, End::Client, Word::Says(2, Message::Done));
    mailbox.put(End::Partition, End::Coordinator, Word::Says(3, Message::Done));
    mailbox.drain();
    assert_eq!(*coordinator.heard.lock(), [3]);
}

#[test]
fn a_client_joins_once() {
    let (mailbox, _ends) = ends(false);
    let client = Arc::new(Ear::default());
    let weak = || Arc::downgrade(&client) as Weak<dyn Hears>;
    assert!(mailbox.join(weak()));
    assert!(!mailbox.join(weak()));
    mailbox.put(End::Coordinator, End::Client, Word::Says(1, Message::Done));
    mailbox.drain();
    assert_eq!(*client.heard.lock(), [1]);
}

#[test]
fn what_is_held_back_is_heard_when_it_is_let_go() {
    let (mailbox, [coordinator, partition]) = ends(false);
    mailbox.hold(|to, word| to == End::Coordinator && matches!(word, Word::Says(2.., _)));
    for request in [1, 2, 3] {
        mailbox.put(End::Partition, End::Coordinator, Word::Says(request, Message::Done));
        mailbox.put(End::Coordinator, End::Partition, Word::Says(request, Message::Done));
    }
    mailbox.drain();
    assert_eq!((&coordinator.heard.lock()[..], &partition.heard.lock()[..]), (&[1][..], &[1, 2, 3][..]));
    assert!(mailbox.let_go() && mailbox.let_go() && !mailbox.let_go());
    assert_eq!(coordinator.heard.lock()[..], [1, 2, 3]);
}
