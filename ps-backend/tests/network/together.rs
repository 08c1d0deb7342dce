//! Several learners of a synchronous job write at the same time, and the blocks of all of them go to the shards at
//! once.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use libmodelio::contributor::{ContributeError, Contributor, Share};
use libmodelio::vocabulary::ids::Version;

use crate::ahead::{BYTES, commit, contributor, pull, sees, set_lease, wait_for_pushed, ways, write};
use crate::payload::of_shard;
use crate::world::{Client, LONG, Way, World, is_all};

/// A world in which these numbers of learners are on clients of their own.
fn learners(way: Way, on_clients: &[usize]) -> (World, Vec<Client>, Vec<Arc<Contributor>>) {
    learners_of(way, on_clients, "false")
}

fn learners_of(
    way: Way,
    on_clients: &[usize],
    deterministic: &str,
) -> (World, Vec<Client>, Vec<Arc<Contributor>>) {
    let count = on_clients.iter().sum::<usize>().to_string();
    let settings = [("reducer", "sum"), ("learners", &*count), ("deterministic", deterministic)];
    let world = World::new(1, BYTES, &settings, way);
    let clients: Vec<Client> = on_clients.iter().map(|_| world.client()).collect();
    let of_clients = clients.iter().zip(on_clients).enumerate();
    let learners = of_clients.flat_map(|(at, (client, &count))| {
        (0..count).map(move |of| contributor(client, &format!("l{at}-{of}"))).collect::<Vec<_>>()
    });
    let learners = learners.collect();
    (world, clients, learners)
}

type Outcome = Receiver<Result<(), ContributeError>>;

fn begin_commit(contributor: &Arc<Contributor>) -> Outcome {
    let (sender, receiver) = channel();
    contributor.commit(Share::None, LONG, move |result| drop(sender.send(result)));
    receiver
}

/// All commit at the same time.
fn all_commit(learners: &[Arc<Contributor>]) {
    let outcomes: Vec<Outcome> = learners.iter().map(begin_commit).collect();
    for outcome in outcomes {
        assert_eq!(outcome.recv_timeout(2 * LONG).unwrap(), Ok(()));
    }
}

#[test]
fn blocks_of_all_learners_come_before_any_of_them_commits() {
    for way in ways() {
        for on_clients in [&[1, 1][..], &[2], &[2, 1], &[1, 1, 1]] {
            let (world, clients, learners) = learners(way, on_clients);
            for step in 1..=4u64 {
                let before = of_shard(&world).pushed_bytes;
                let sent = BYTES * clients.len() as u64;
                for part in [0..BYTES / 2, BYTES / 2..BYTES] {
                    learners.iter().for_each(|learner| write(learner, 1.0, part.clone()));
                }
                // Each client keeps up to three blocks for the commit.
                wait_for_pushed(
                    &world,
                    before + sent - 3 * (clients.len() as u64 - 1) * u64::from(crate::world::BLOCK),
                );
                assert_eq!(clients[0].version(), Version(step - 1), "{way:?}: nothing is committed");
                all_commit(&learners);
                sees(&clients[0], &learners[0], step, step as f32 * learners.len() as f32);
                assert_eq!(of_shard(&world).pushed_bytes, before + sent, "{way:?}: nothing is sent twice");
            }
        }
    }
}

#[test]
fn a_deterministic_job_sends_after_the_commits_and_adds_in_the_order_of_learners() {
    let value = |learner: usize| [0.1f32, 3e7, -3e7][learner];
    let sum = (value(0) + value(1)) + value(2);
    assert_ne!(sum, value(0) + (value(1) + value(2)), "the order decides");
    for way in ways() {
        for on_clients in [&[2, 1][..], &[1, 1, 1]] {
            for orders in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
                let (world, clients, learners) = learners_of(way, on_clients, "true");
                for learner in orders {
                    write(&learners[learner], value(learner), 0..BYTES);
                }
                assert_eq!(of_shard(&world).pushed_bytes, 0, "{way:?}, {orders:?}: nothing is committed");
                all_commit(&learners);
                let (_, weights) = pull(&clients[0], &learners[0]);
                is_all(&weights, sum);
            }
        }
    }
}

#[test]
fn a_learner_that_begins_anew_makes_the_others_send_again_and_all_count_once() {
    for way in ways() {
        for on_clients in [&[1, 1][..], &[2]] {
            let (_world, clients, learners) = learners(way, on_clients);
            for step in 1..=6u64 {
                learners.iter().for_each(|learner| write(learner, 1000.0, 0..BYTES / 2));
                assert!(learners[1].abort());
                write(&learners[1], 1.0, 0..BYTES);
                write(&learners[0], 1000.0, BYTES / 2..BYTES);
                all_commit(&learners);
                sees(&clients[0], &learners[0], step, step as f32 * 1001.0);
            }
        }
    }
}

#[test]
fn what_a_dead_learner_has_sent_is_taken_out_and_the_others_go_on() {
    for way in ways() {
        let (world, mut clients, mut learners) = learners(way, &[1, 1]);
        learners.iter().for_each(|learner| write(learner, 1000.0, 0..BYTES / 2));
        wait_for_pushed(&world, BYTES - 3 * u64::from(crate::world::BLOCK));
        // Not before, and not shorter: a machine that is busy may be silent for seconds, and alive.
        set_lease(&clients[0], "4");
        learners.pop();
        clients.pop().expect("two clients").dies();
        write(&learners[0], 1000.0, BYTES / 2..BYTES);
        assert_eq!(commit(&learners[0]), Ok(()), "{way:?}");
        sees(&clients[0], &learners[0], 1, 1000.0);
    }
}

#[test]
fn a_commit_does_not_wait_for_ever_for_one_that_writes() {
    for way in ways() {
        let (_world, clients, learners) = learners(way, &[1, 1]);
        for step in 1..=3u64 {
            write(&learners[0], 1.0, 0..BYTES);
            write(&learners[1], 1.0, 0..BYTES / 2);
            let begun = Instant::now();
            assert_eq!(commit(&learners[0]), Ok(()), "{way:?}");
            let waited = begun.elapsed();
            assert!(waited < LONG / 3, "{way:?}: it has waited for {waited:?}");
            write(&learners[1], 1.0, BYTES / 2..BYTES);
            assert_eq!(commit(&learners[1]), Ok(()), "{way:?}");
            sees(&clients[0], &learners[0], step, 2.0 * step as f32);
        }
    }
}

#[test]
fn a_learner_that_only_commits_takes_part_in_the_plan_of_the_others() {
    for way in ways() {
        let (_world, clients, learners) = learners(way, &[1, 1]);
        for step in 1..=3u64 {
            write(&learners[0], 1.0, 0..BYTES);
            // Blocks that are written in part are sent when all have committed.
            write(&learners[1], 1.0, 4..8);
            let first = begin_commit(&learners[1]);
            std::thread::sleep(Duration::from_millis(20));
            all_commit(&learners[..1]);
            assert_eq!(first.recv_timeout(2 * LONG).unwrap(), Ok(()), "{way:?}");
            let (_, weights) = pull(&clients[0], &learners[0]);
            assert_eq!(weights[1], 2.0 * step as f32);
            is_all(&weights[2..], step as f32);
        }
    }
}

#[test]
fn mapped_memory_whose_commit_is_withdrawn_in_mid_plan_is_its_programs_again() {
    for way in ways() {
        let (_world, clients, learners) = learners(way, &[1, 1]);
        let [writes, maps] = &learners[..] else { panic!("two learners") };
        let commits = |value: f32| {
            maps.store_mapped(0, &value.to_le_bytes().repeat(BYTES as usize / 4)).unwrap();
            let (sender, receiver) = channel();
            maps.commit_mapped(LONG, move |result| drop(sender.send(result)));
            receiver
        };
        let (mut sum, mut withdrawn) = (0.0, 0);
        for step in 1..=4u64 {
            write(writes, 1.0, 0..BYTES / 2);
            let first = commits(1000.0);
            std::thread::sleep(Duration::from_millis(10 * step));
            maps.withdraw();
            // Where no plan takes both, it may be added up already.
            sum += match first.recv_timeout(2 * LONG).unwrap() {
                Ok(()) => 1001.0,
                Err(_) => 2.0,
            };
            let again = (sum < 1000.0).then(|| commits(1.0));
            withdrawn += usize::from(again.is_some());
            write(writes, 1.0, BYTES / 2..BYTES);
            all_commit(&learners[..1]);
            if let Some(again) = again {
                assert_eq!(again.recv_timeout(2 * LONG).unwrap(), Ok(()), "{way:?}");
            }
            sees(&clients[0], writes, step, sum);
            if sum > 1000.0 {
                break;
            }
        }
        assert!(withdrawn > 0, "{way:?}");
    }
}
