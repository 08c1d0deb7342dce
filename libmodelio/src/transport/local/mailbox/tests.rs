//! Two ends that answer each other, and threads that put words in at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// Notes what it hears, and answers each request above 0 with the one below it.
#[derive(Default)]
struct Receiver {
    /// Itself, and whom it answers.
    answers: Option<(MailboxEnd, MailboxEnd)>,
    mailbox: OnceLock<Arc<Mailbox>>,
    received: Mutex<Vec<u64>>,
    /// Calls that are under way, of both ends.
    under_way: Arc<AtomicUsize>,
}

impl Recipient for Receiver {
    fn receive(self: Arc<Self>, from: MailboxEnd, mail: Mail) {
        assert_eq!(self.under_way.fetch_add(1, Ordering::SeqCst), 0, "called from another end's stack");
        let Mail::Message(request, Message::Done) = mail else { panic!("{mail:?}") };
        self.received.lock().push(request);
        if let (Some((own, other)), Some(mailbox), true) = (self.answers, self.mailbox.get(), request > 0) {
            assert_eq!(from, other);
            mailbox.put(own, other, Mail::Message(request - 1, Message::Done));
            mailbox.drain();
        }
        self.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A mailbox with its two ends; `answers` if they answer each other.
fn ends(answers: bool) -> (Arc<Mailbox>, [Arc<Receiver>; 2]) {
    let under_way = Arc::new(AtomicUsize::new(0));
    let ends =
        [(MailboxEnd::Coordinator, MailboxEnd::Partition), (MailboxEnd::Partition, MailboxEnd::Coordinator)]
            .map(|pair| {
                let under_way = Arc::clone(&under_way);
                Arc::new(Receiver { answers: answers.then_some(pair), under_way, ..Receiver::default() })
            });
    let weak = |end: &Arc<Receiver>| -> Weak<dyn Recipient> { Arc::downgrade(end) as Weak<dyn Recipient> };
    let mailbox = Arc::new(Mailbox::new(weak(&ends[0]), weak(&ends[1])));
    for end in &ends {
        assert!(end.mailbox.set(Arc::clone(&mailbox)).is_ok());
    }
    (mailbox, ends)
}

#[test]
fn no_end_is_called_from_the_stack_of_the_other() {
    const ROUNDS: u64 = 100_000;
    let (mailbox, [coordinator, partition]) = ends(true);
    mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Partition, Mail::Message(ROUNDS, Message::Done));
    mailbox.drain();
    let down = |from: u64| (0..=from).rev().step_by(2).collect::<Vec<u64>>();
    assert_eq!(*partition.received.lock(), down(ROUNDS));
    assert_eq!(*coordinator.received.lock(), down(ROUNDS - 1));
}

#[test]
fn messages_of_many_threads_come_once_each_and_in_their_order() {
    const THREADS: u64 = 8;
    const MESSAGES: u64 = 5_000;
    let (mailbox, [coordinator, partition]) = ends(false);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let mailbox = &mailbox;
            scope.spawn(move || {
                for number in 0..MESSAGES {
                    let to = if number % 3 == 0 { MailboxEnd::Coordinator } else { MailboxEnd::Partition };
                    mailbox.put(MailboxEnd::Client, to, Mail::Message(thread << 32 | number, Message::Done));
                    mailbox.drain();
                }
            });
        }
    });
    for (end, is_its_own) in [(&coordinator, true), (&partition, false)] {
        let received = end.received.lock();
        for thread in 0..THREADS {
            let of_thread =
                received.iter().filter(|number| *number >> 32 == thread).map(|number| number & 0xffff_ffff);
            let expected = (0..MESSAGES).filter(|number| (number % 3 == 0) == is_its_own);
            assert!(of_thread.eq(expected), "thread {thread}, {is_its_own}");
        }
    }
}

#[test]
fn messages_to_an_end_that_is_gone_are_lost() {
    let (mailbox, [coordinator, partition]) = ends(false);
    drop(partition);
    mailbox.put(MailboxEnd::Client, MailboxEnd::Partition, Mail::Message(1, Message::Done));
    mailbox.put(MailboxEnd::Partition, MailboxEnd::Client, Mail::Message(2, Message::Done));
    mailbox.put(MailboxEnd::Partition, MailboxEnd::Coordinator, Mail::Message(3, Message::Done));
    mailbox.drain();
    assert_eq!(*coordinator.received.lock(), [3]);
}

#[test]
fn a_client_joins_once() {
    let (mailbox, _ends) = ends(false);
    let client = Arc::new(Receiver::default());
    let weak = || Arc::downgrade(&client) as Weak<dyn Recipient>;
    assert!(mailbox.join(weak()));
    assert!(!mailbox.join(weak()));
    mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Client, Mail::Message(1, Message::Done));
    mailbox.drain();
    assert_eq!(*client.received.lock(), [1]);
}

/// A client whose answers are counted, beside two ends that answer each other for long.
struct Caller(AtomicUsize, Weak<Receiver>);

impl Recipient for Caller {
    fn receive(self: Arc<Self>, _: MailboxEnd, _: Mail) {}

    fn answer_callers(&self) {
        let handed_over = self.1.upgrade().map_or(0, |end| end.received.lock().len());
        assert!(handed_over <= (self.0.fetch_add(1, Ordering::SeqCst) + 1) * ANSWERS_AFTER);
    }
}

#[test]
fn callers_are_answered_though_the_mailbox_is_not_empty() {
    const ROUNDS: u64 = 1_000;
    let (mailbox, [coordinator, _partition]) = ends(true);
    let caller = Arc::new(Caller(AtomicUsize::new(0), Arc::downgrade(&coordinator)));
    assert!(mailbox.join(Arc::downgrade(&caller) as Weak<dyn Recipient>));
    mailbox.put(MailboxEnd::Coordinator, MailboxEnd::Partition, Mail::Message(ROUNDS, Message::Done));
    mailbox.drain();
    assert_eq!(caller.0.load(Ordering::SeqCst), ROUNDS as usize / ANSWERS_AFTER + 1);
}
