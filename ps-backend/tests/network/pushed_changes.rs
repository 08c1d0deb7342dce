//! New weights that come as what they change: a block counts only if it is the client's, and else comes on the whole.

use libmodelio::bytes::changes::Changed;
use libmodelio::bytes::crc32c::crc32c;
use libmodelio::transport::reactor::Choice;
use libmodelio::vocabulary::ids::{BlockId, PlanId, Version};
use libmodelio::vocabulary::meta::Meta;
use libmodelio::wire::{Message, Refusal, Role};

use crate::raw::{Raw, committed};
use crate::world::{BLOCK, LONG, Way, World, until};

const BLOCKS: u32 = 5;

/// All zeros at first.
fn world() -> World {
    let settings = [("reducer", "assign"), ("learners", "1")];
    World::new(1, u64::from(BLOCKS * BLOCK), &settings, Way::Tcp(Choice::Auto))
}

fn plan_of(raw: &mut Raw) -> PlanId {
    let grant = raw.receive_of(|message| matches!(message, Message::Grant { .. })).0.message;
    let Message::Grant { plan, .. } = grant else { unreachable!() };
    plan
}

/// The blocks that the shard lacks.
fn missing(data: &mut Raw, plan: PlanId) -> Vec<u32> {
    data.say(0, &Message::Probe { plan });
    let missing = data.receive_of(|message| matches!(message, Message::Missing { .. })).0.message;
    let Message::Missing { blocks, .. } = missing else { unreachable!() };
    blocks.into_iter().flatten().collect()
}

#[test]
fn changes_count_only_if_they_make_the_clients_block() {
    let world = world();
    let mut control = Raw::welcomed(&world, Role::Control, 7);
    control.say(0, &Message::AckThrough { request: 0, newest: 1 });
    let (blocks, timeout_ms) = (std::iter::once(0..BLOCKS).collect(), LONG.as_millis() as u32);
    control.say(1, &Message::Assign { token: 1, blocks, timeout_ms, ahead: None, meta: Meta::default() });
    let plan = plan_of(&mut control);
    let (old, mut new) = (vec![0; BLOCK as usize], vec![0; BLOCK as usize]);
    new[1000] = 1;
    let (mut patch, mut nothing) = (Vec::new(), Vec::new());
    assert!(Changed::between(&old, &new, 4).patch(&new, &mut patch));
    assert!(Changed::Nothing.patch(&old, &mut nothing));
    let (crc, same) = (crc32c(&new), crc32c(&old));
    let changes = |block, base, crc| Message::PushChanges {
        plan,
        block: BlockId(block),
        base: Version(base),
        crc,
        ahead: false,
    };
    let mut data = Raw::welcomed(&world, Role::Data, 7);
    data.say_with(0, &changes(0, 9, crc), &patch);
    data.say_with(0, &changes(1, 0, crc ^ 1), &patch);
    assert_eq!(missing(&mut data, plan), (0..BLOCKS).collect::<Vec<_>>(), "no such base; another block");
    for (sent, says) in [
        (&patch[..patch.len() - 1], "not as long as it says"),
        (&vec![0; BLOCK as usize + 1], "payload of PushChanges"),
    ] {
        let mut data = Raw::welcomed(&world, Role::Data, 7);
        data.say_with(0, &changes(2, 0, crc), sent);
        let refusal = data.refusal();
        assert!(refusal.to_string().contains(says), "{refusal}");
    }
    // The rest of a refused connection is over before its block can come again.
    until("no block is reserved", || missing(&mut data, plan).len() == BLOCKS as usize);
    data.say_with(0, &changes(0, 0, crc), &patch);
    for block in 1..BLOCKS {
        data.say_with(0, &changes(block, 0, same), &nothing);
    }
    assert_eq!(control.answer(1), Message::Done);
    let client = world.client();
    until("the version is shown", || client.version() == Version(1));
    let view = client.get(Version(1)).unwrap();
    assert!(view.bytes(0..u64::from(BLOCK)) == new);
    let rest = view.bytes(u64::from(BLOCK)..client.layout().size());
    assert!(rest.iter().all(|byte| *byte == 0));
}

#[test]
fn contributions_do_not_come_as_changes() {
    let world = world();
    let (mut control, learner) = Raw::joined(&world, 7);
    control.say(2, &committed(learner, 1, BLOCKS));
    let plan = plan_of(&mut control);
    let mut data = Raw::welcomed(&world, Role::Data, 7);
    let base = Version(0);
    let changes = Message::PushChanges { plan, block: BlockId(0), base, crc: 0, ahead: false };
    data.say_with(0, &changes, &[0; 12]);
    let refusal = data.refusal();
    assert_eq!(refusal, Refusal::other("only new weights come as what they change"));
}
