//! Strategies of proptest that make any message, with any values in its fields, for property tests of the codec.

use std::ops::Range;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use strum::IntoEnumIterator;

use super::*;
use crate::vocabulary::block_ranges::BlockRanges;
use crate::vocabulary::coding::{Coding, Form};
use crate::vocabulary::controls::Controls;
use crate::vocabulary::groups::{AveragedMark, Contents, Groups, Overrides};
use crate::vocabulary::ids::{
    BlockId, ClientId, Epoch, Generation, Incarnation, LearnerId, PlanId, ReaderId, ShardId, Step, Version,
};
use crate::vocabulary::members::{Attached, LeaveReason, LifeSign};
use crate::vocabulary::meta::Meta;
use crate::vocabulary::norm::{ExactSum, Norm, Quantity, Squares, TensorFactors, TensorSquares};
use crate::vocabulary::partly::PartlyWritten;
use crate::vocabulary::phase::JobPhase;
use crate::vocabulary::readers::ReaderState;
use crate::vocabulary::reducer::{self, Combine, Content, Hyper, Reducer};
use crate::vocabulary::shard_error::ShardError;
use crate::vocabulary::strided::Strided;
use crate::vocabulary::tensor_steps::TensorSteps;
use crate::vocabulary::weight::Weight;

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,20}"
}

fn id64<T: std::fmt::Debug>(of: fn(u64) -> T) -> impl Strategy<Value = T> {
    prop_oneof![0..300u64, any::<u64>()].prop_map(of)
}

fn learner() -> impl Strategy<Value = LearnerId> {
    any::<u32>().prop_map(LearnerId)
}

fn shard() -> impl Strategy<Value = ShardId> {
    any::<u16>().prop_map(ShardId)
}

fn block() -> impl Strategy<Value = BlockId> {
    any::<u32>().prop_map(BlockId)
}

fn strided() -> impl Strategy<Value = Strided> {
    let bounds = (any::<u32>(), 1..200u64, 0..1u64 << 40, 1..200u64);
    bounds.prop_map(|(start, run, gap, count)| Strided { start: start.into(), run, stride: run + gap, count })
}

fn range() -> impl Strategy<Value = Range<u32>> {
    (0..u32::MAX)
        .prop_flat_map(|start| (Just(start), start + 1..=u32::MAX))
        .prop_map(|(start, end)| start..end)
}

pub(super) fn block_ranges() -> impl Strategy<Value = BlockRanges> {
    vec((1..5000u32, 1..5000u32), 0..8).prop_map(|steps| {
        let mut end = 0;
        let next = |(gap, length): (u32, u32)| {
            let start = end + gap;
            end = start + length;
            start..end
        };
        steps.into_iter().map(next).collect()
    })
}

fn reason() -> impl Strategy<Value = LeaveReason> {
    prop_oneof![
        Just(LeaveReason::Asked),
        Just(LeaveReason::Died),
        Just(LeaveReason::LeaseExpired),
        Just(LeaveReason::PatienceOver),
        Just(LeaveReason::Exited)
    ]
}

fn contents() -> impl Strategy<Value = Contents> {
    let mark = any::<u32>().prop_map(AveragedMark);
    (content(), mark).prop_map(|(content, averaged)| Contents { content, averaged })
}

fn content() -> impl Strategy<Value = Content> {
    proptest::sample::select(Content::iter().collect::<Vec<_>>())
}

fn weight() -> impl Strategy<Value = Weight> {
    (1u32..).prop_map(|weight| weight.to_string().parse().unwrap())
}

fn attached() -> impl Strategy<Value = Attached> {
    prop_oneof![Just(Attached::No), Just(Attached::Yes), Just(Attached::Exited)]
}

fn life_sign() -> impl Strategy<Value = LifeSign> {
    prop_oneof![Just(LifeSign::Writes), Just(LifeSign::Works), attached().prop_map(LifeSign::Process)]
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![
        Just(Role::Control),
        Just(Role::Data),
        Just(Role::Coordinator),
        Just(Role::Admin),
        Just(Role::Relay)
    ]
}

fn shard_error() -> impl Strategy<Value = ShardError> {
    prop_oneof![
        learner().prop_map(ShardError::UnknownLearner),
        text().prop_map(ShardError::NameTaken),
        any::<usize>().prop_map(ShardError::TooManyLearners),
        (id64(Step), id64(Step)).prop_map(|(got, expected)| ShardError::StepOutOfOrder { got, expected }),
        (block(), any::<usize>()).prop_map(|(block, bytes)| ShardError::BadBlock { block, bytes }),
        Just(ShardError::OutOfRange),
        block().prop_map(ShardError::NonFinite),
        any::<(u32, u32)>().prop_map(|(active, needed)| ShardError::Stopped { active, needed }),
        text().prop_map(|text| ShardError::TimedOut(text.into())),
        Just(ShardError::Interrupted),
        Just(ShardError::Unreachable),
        text().prop_map(ShardError::OutOfMemory),
        text().prop_map(ShardError::NotAllowed),
        text().prop_map(ShardError::Lost),
        text().prop_map(ShardError::OutOfFiles),
        text().prop_map(ShardError::ReaderTaken),
        (any::<usize>(), text()).prop_map(|(most, who)| ShardError::TooManyReaders(most, who)),
        (id64(Version), id64(Version)).prop_map(|(got, newest)| ShardError::NoVersionYet { got, newest }),
        text().prop_map(ShardError::NoReader),
        text().prop_map(ShardError::Busy),
        any::<u64>().prop_map(ShardError::Uncovered),
        any::<u32>().prop_map(ShardError::PartGone),
        text().prop_map(ShardError::RolledBack),
    ]
}

fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        shard_error().prop_map(Refusal::Shard),
        any::<(u16, u16)>().prop_map(|(expected, got)| Refusal::Protocol { expected, got }),
        text().prop_map(Refusal::NoModel),
        (text(), id64(Generation), id64(Generation)).prop_map(|(model, expected, got)| Refusal::Generation {
            model,
            expected,
            got
        }),
        text().prop_map(Refusal::Exists),
        (id64(Epoch), id64(Epoch)).prop_map(|(expected, got)| Refusal::Epoch { expected, got }),
        block().prop_map(|block| Refusal::NotMine { block }),
        (id64(Version), id64(Version)).prop_map(|(wanted, newest)| Refusal::NoVersion { wanted, newest }),
        text().prop_map(|what| Refusal::Role { what }),
        text().prop_map(Refusal::Control),
        text().prop_map(Refusal::Other),
        (text(), text(), text()).prop_map(|(what, expected, got)| Refusal::Frame { what, expected, got }),
        text().prop_map(Refusal::Deleted),
        (shard(), text()).prop_map(|(shard, address)| Refusal::NumberTaken { shard, address }),
        text().prop_map(Refusal::NoRdma),
        (any::<u64>(), any::<u64>())
            .prop_map(|(plan, newest)| Refusal::Plan { plan: PlanId(plan), newest: PlanId(newest) }),
        shard().prop_map(|off| Refusal::Moving { off }),
    ]
}

fn learner_state() -> impl Strategy<Value = LearnerState> {
    (learner(), any::<u32>(), id64(Step), any::<bool>(), id64(Version), id64(Version), attached()).prop_map(
        |(learner, incarnation, step, unpublished, published_in, joined_at, attached)| LearnerState {
            learner,
            incarnation: Incarnation(incarnation),
            step,
            unpublished,
            published_in,
            joined_at,
            attached,
        },
    )
}

fn controls() -> impl Strategy<Value = Controls> {
    let pull = proptest::sample::select(vec!["auto", "eager", "adaptive", "on-demand"]);
    let own = proptest::sample::select(vec!["auto", "true", "false"]);
    let wire = proptest::sample::select(vec!["full", "int8", "topk(0.01)"]);
    let schedule = proptest::sample::select(vec!["constant", "linear(30)", "cosine(4294967295)"]);
    let schedule = (schedule, 0u32..30, 0u64..1 << 48);
    let consistencies = vec!["sync", "quorum(3)", "grace(65536, 0.25)", "async", "ssp(2)"];
    let consistency = (proptest::sample::select(consistencies), any::<bool>());
    let rules = "([a-z*?]{1,9} (frozen|weight_decay=0|reducer=adam)\n){0,3}";
    let patterns = ("[a-z*?]{0,9}", rules);
    let all = (0.0f32..1.0, 1u32..9, patterns, pull, (own, wire), schedule, consistency);
    all.prop_map(
        |(
            rate,
            learners,
            (frozen, rules),
            pull,
            (own, wire),
            (schedule, warmup, start),
            (consistency, aware),
        )| {
            let aware = aware && ["async", "ssp(2)"].contains(&consistency);
            let texts = [
                ("learning_rate", rate.to_string()),
                ("learners", learners.to_string()),
                ("max_learners", (4000 + learners).to_string()),
                ("frozen", frozen),
                ("tensors", rules),
                ("pull", pull.to_owned()),
                ("read_own_step", own.to_owned()),
                ("wire", wire.to_owned()),
                ("schedule", schedule.to_owned()),
                ("warmup", warmup.to_string()),
                ("schedule_start", start.to_string()),
                ("consistency", consistency.to_owned()),
                ("staleness_aware", aware.to_string()),
            ];
            Controls::default()
                .with_all(texts.iter().map(|(name, text)| (*name, text.as_str())))
                .expect("settings")
        },
    )
}

fn form() -> impl Strategy<Value = Form> {
    let share = (1u32..=1_000_000).prop_filter_map("a share", |share| share.try_into().ok());
    let fixed = proptest::sample::select(vec![Coding::Bf16, Coding::Fp16, Coding::Int8, Coding::Fp8]);
    let coding = prop_oneof![fixed, share.prop_map(Coding::TopK)];
    prop_oneof![Just(Form::Plain), Just(Form::Wide), coding.prop_map(Form::Coded)]
}

fn job_phase() -> impl Strategy<Value = JobPhase> {
    use JobPhase::{Failed, Forming, Reducing, Running, Stopped, Waiting};
    proptest::sample::select(vec![Running, Forming, Reducing, Stopped, Waiting, Failed])
}

fn reducer() -> impl Strategy<Value = Reducer> {
    proptest::sample::select(Reducer::all().collect::<Vec<_>>())
}

fn step() -> impl Strategy<Value = reducer::Step> {
    let numbers = (reducer(), any::<u32>(), norm(), any::<u64>(), norm());
    numbers.prop_map(|(reducer, contributions, weight, t, norm)| reducer::Step {
        reducer,
        hyper: Hyper::default(),
        contributions,
        weight,
        t,
        norm,
        ..reducer::Step::default()
    })
}

fn groups() -> impl Strategy<Value = Groups> {
    let overrides = (proptest::option::of(reducer()), proptest::option::of(0.0f32..1.0), any::<Option<u8>>());
    vec(overrides, 0..4).prop_map(|all| {
        Groups::new(all.into_iter().map(|(reducer, weight_decay, scale)| Overrides {
            reducer,
            weight_decay,
            learning_rate_scale: scale.map(f32::from),
        }))
    })
}

/// Any, NaN too.
fn norm() -> impl Strategy<Value = Option<Norm>> {
    proptest::option::of(any::<f64>().prop_map(Norm::new))
}

fn exact_sum() -> impl Strategy<Value = ExactSum> {
    let number = prop_oneof![(0.0f64..1e300), Just(f64::INFINITY)];
    vec(number, 0..4).prop_map(|numbers| {
        let mut sum = ExactSum::default();
        numbers.into_iter().for_each(|number| sum.add(number));
        sum
    })
}

fn squares() -> impl Strategy<Value = Squares> {
    let tensor =
        (exact_sum(), exact_sum()).prop_map(|(weights, direction)| TensorSquares { weights, direction });
    prop_oneof![exact_sum().prop_map(Squares::Gradient), vec(tensor, 0..3).prop_map(Squares::Tensors)]
}

fn factors() -> impl Strategy<Value = TensorFactors> {
    vec(proptest::option::of(any::<f64>()), 0..4).prop_map(TensorFactors::new)
}

fn meta() -> impl Strategy<Value = Meta> {
    vec(("[a-z]{1,9}", "[a-zü ]{0,9}"), 0..3).prop_map(|texts| {
        let mut meta = Meta::default();
        meta.add(texts).unwrap();
        meta
    })
}

fn job_state() -> impl Strategy<Value = JobState> {
    (
        (id64(Version), id64(PlanId), any::<Option<u64>>()),
        any::<(u64, u32, u32, u64)>(),
        controls(),
        job_phase(),
        vec(learner_state(), 0..4),
        (vec(text(), 0..3), any::<u32>(), vec(any::<u16>().prop_map(ShardId), 0..3)),
        (norm(), any::<Option<u64>>(), id64(PlanId)),
        (any::<u32>(), proptest::option::of(0u64..1 << 60), proptest::option::of(0.0f32..9.0), id64(Version)),
        (meta(), any::<u64>(), vec(text(), 0..3), proptest::option::of(id64(Version))),
    )
        .prop_map(
            |(
                (version, over, acked_through),
                (sequence, members, committed, contributions),
                controls,
                phase,
                learners,
                (late, late_more, away),
                (norm, own_weights, made_by),
                (newest_of, grace_window, rate, replicas_since),
                (meta, readers, held_by, durable),
            )| JobState {
                sequence,
                version,
                over,
                acked_through,
                controls,
                phase,
                learners,
                members,
                committed,
                contributions,
                late,
                late_more,
                away,
                norm,
                own_weights,
                made_by,
                newest_of,
                grace_window: grace_window.map(Duration::from_nanos),
                rate,
                replicas_since,
                meta,
                readers,
                held_by,
                durable,
            },
        )
}

fn reader_does() -> impl Strategy<Value = ReaderDoes> {
    prop_oneof![
        (text(), id64(Version)).prop_map(|(host, staged)| ReaderDoes::Begins { host, staged }),
        id64(Version).prop_map(ReaderDoes::Applies),
        Just(ReaderDoes::Ends),
    ]
}

fn learner_record() -> impl Strategy<Value = LearnerRecord> {
    (text(), any::<u32>().prop_map(Incarnation), proptest::option::of(id64(Step)))
        .prop_map(|(name, incarnation, step)| LearnerRecord { name, incarnation, step })
}

fn reader_state() -> impl Strategy<Value = ReaderState> {
    let version = || id64(Version);
    (any::<(u32, bool, bool)>(), text(), text(), version(), proptest::option::of(version())).prop_map(
        |((reader, is_own, is_given_up), name, host, staged, applied)| ReaderState {
            reader: ReaderId(reader),
            name,
            host,
            is_own,
            staged,
            applied,
            is_given_up,
        },
    )
}

fn partly() -> impl Strategy<Value = PartlyWritten> {
    vec(((0..u32::MAX).prop_map(BlockId), block_ranges()), 0..4).prop_map(|blocks| {
        let mut partly = PartlyWritten::default();
        for (block, written) in blocks.into_iter().filter(|(_, written)| !written.is_empty()) {
            partly.insert(block, written);
        }
        partly
    })
}

fn plan() -> impl Strategy<Value = Plan> {
    let tensors = || vec((any::<u32>(), any::<u64>()), 0..4).prop_map(TensorSteps::from);
    let quantity = prop_oneof![Just(Quantity::Gradient), Just(Quantity::Tensors)];
    let work = prop_oneof![
        prop_oneof![Just(Combine::Sum), Just(Combine::Last)].prop_map(|combine| Work::Add { combine }),
        any::<u64>().prop_map(|token| Work::Assign { token }),
        (step(), tensors(), groups(), factors(), any::<bool>()).prop_map(
            |(step, tensors, groups, factors, fresh_state)| {
                Work::Reduce { step, tensors, groups, factors, fresh_state }
            }
        ),
        (step(), tensors(), groups(), quantity).prop_map(|(step, tensors, groups, quantity)| {
            Work::Measure { step, tensors, groups, quantity }
        }),
    ];
    let source = (id64(ClientId), block_ranges(), any::<bool>(), partly(), any::<bool>()).prop_map(
        |(client, blocks, check, partly, provisional)| PlanSource {
            client,
            blocks,
            check,
            partly,
            provisional,
        },
    );
    let part = (id64(ClientId), any::<u64>(), block_ranges());
    let part = part.prop_map(|(client, token, blocks)| PlanPart { client, token, blocks });
    let set = (any::<bool>(), vec(part, 0..4)).prop_map(|(all, parts)| SetOfParts { all, parts });
    let rest = (any::<bool>(), any::<u32>(), proptest::option::of(set));
    (id64(PlanId), id64(Version), work, vec(source, 0..4), rest).prop_map(
        |(plan, base, work, sources, (ordered, changes, parts))| Plan {
            plan,
            base,
            work,
            sources,
            ordered,
            changes,
            parts,
        },
    )
}

fn kept() -> impl Strategy<Value = DataKind> {
    prop_oneof![Just(DataKind::Weights), Just(DataKind::Masters), any::<u8>().prop_map(DataKind::Slot)]
}

fn granted() -> impl Strategy<Value = Granted> {
    prop_oneof![
        (vec((learner(), id64(Step)), 0..5), any::<bool>(), proptest::option::of(vec(learner(), 0..3)),)
            .prop_map(|(of, replaces, open)| Granted::Contributions { of, replaces, open }),
        any::<u64>().prop_map(Granted::Weights),
        any::<u64>().prop_map(Granted::OpenWeights)
    ]
}

pub(super) fn shard_record() -> impl Strategy<Value = ShardRecord> {
    (shard(), text(), text(), any::<bool>(), text()).prop_map(|(shard, address, host, draining, rdma)| {
        ShardRecord { shard, address, host, draining, rdma }
    })
}

fn registry_request() -> impl Strategy<Value = RegistryRequest> {
    prop_oneof![
        (shard_record(), any::<u32>(), any::<bool>())
            .prop_map(|(record, lease_ms, bound)| { RegistryRequest::Announce { record, lease_ms, bound } }),
        shard().prop_map(|shard| RegistryRequest::Withdraw { shard }),
        shard().prop_map(|shard| RegistryRequest::Drain { shard }),
        Just(RegistryRequest::Shards),
        Just(RegistryRequest::Models),
        text().prop_map(|name| RegistryRequest::Model { name }),
        proptest::option::of(id64(Epoch)).prop_map(|replaces| RegistryRequest::Put { replaces }),
        (text(), id64(Generation))
            .prop_map(|(name, generation)| RegistryRequest::Delete { name, generation }),
        shard().prop_map(|shard| RegistryRequest::Undrain { shard }),
        (shard(), vec(held(), 0..4), vec((text(), id64(Generation)), 0..4))
            .prop_map(|(shard, held, deleted)| RegistryRequest::Holding { shard, held, deleted }),
        vec(shard_record(), 0..4).prop_map(|shards| RegistryRequest::Restore { shards }),
        Just(RegistryRequest::Refused),
        (held(), id64(Version), text(), any::<bool>()).prop_map(|(held, reserved, store, newest)| {
            let HeldPartition { model, generation, epoch } = held;
            RegistryRequest::Keep { model, generation, epoch, reserved, store, newest }
        }),
        (id64(Generation), id64(Epoch))
            .prop_map(|(generation, epoch)| RegistryRequest::Succeed { generation, epoch }),
        (shard(), vec(id64(Generation), 0..4), vec(id64(Generation), 0..4))
            .prop_map(|(shard, held, makes)| RegistryRequest::Lost { shard, held, makes }),
    ]
}

fn held() -> impl Strategy<Value = HeldPartition> {
    (text(), id64(Generation), id64(Epoch)).prop_map(|(model, generation, epoch)| HeldPartition {
        model,
        generation,
        epoch,
    })
}

fn lost_model() -> impl Strategy<Value = LostModel> {
    (text(), id64(Generation), vec(shard(), 0..4)).prop_map(|(model, generation, shards)| LostModel {
        model,
        generation,
        shards,
    })
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        id64(Epoch).prop_map(|epoch| Fate::Known { epoch }),
        Just(Fate::Unknown),
        Just(Fate::Deleted),
        id64(Generation).prop_map(|generation| Fate::Taken { generation }),
    ]
}

fn registry_answer() -> impl Strategy<Value = RegistryAnswer> {
    prop_oneof![
        shard().prop_map(RegistryAnswer::Shard),
        vec(shard_record(), 0..4).prop_map(RegistryAnswer::Shards),
        vec(text(), 0..4).prop_map(RegistryAnswer::Models),
        Just(RegistryAnswer::Model),
        Just(RegistryAnswer::Done),
        (any::<bool>(), vec(fate(), 0..4))
            .prop_map(|(draining, fates)| RegistryAnswer::Fates { draining, fates }),
        vec((shard_record(), text()).prop_map(|(record, why)| RefusedShard { record, why }), 0..4)
            .prop_map(RegistryAnswer::Refused),
        (vec(lost_model(), 0..4), vec(shard_record(), 0..4), any::<u32>())
            .prop_map(|(models, needed, rank)| RegistryAnswer::Losses(Losses { models, needed, rank })),
    ]
}

/// One strategy for each variant, in their order.
pub(super) fn each_message() -> Vec<BoxedStrategy<Message>> {
    let protocol = || Just(Protocol::NEWEST.number());
    vec![
        (protocol(), role(), text(), id64(Generation), id64(ClientId))
            .prop_map(|(protocol, role, model, generation, client)| Message::Hello {
                protocol,
                role,
                model,
                generation,
                client,
            })
            .boxed(),
        (protocol(), shard(), id64(Epoch), any::<u32>())
            .prop_map(|(protocol, shard, epoch, silence_ms)| Message::Welcome {
                protocol,
                shard,
                epoch,
                silence_ms,
            })
            .boxed(),
        refusal().prop_map(Message::Refused).boxed(),
        Just(Message::Done).boxed(),
        Just(Message::Ping).boxed(),
        Just(Message::Pong).boxed(),
        text().prop_map(|name| Message::Join { name }).boxed(),
        (learner(), any::<u32>(), any::<u64>())
            .prop_map(|(learner, life, since)| Message::Joined {
                learner,
                incarnation: Incarnation(life),
                since,
            })
            .boxed(),
        (learner(), reason()).prop_map(|(learner, reason)| Message::Leave { learner, reason }).boxed(),
        learner().prop_map(|learner| Message::Open { learner }).boxed(),
        (id64(Step), any::<bool>())
            .prop_map(|(step, staging_lent)| Message::Opened { step, staging_lent })
            .boxed(),
        (
            (learner(), id64(Step), block_ranges(), block_ranges()),
            (proptest::option::of(partly()), contents(), weight(), any::<u32>(), any::<bool>()),
            (proptest::option::of(id64(PlanId)), proptest::option::of(id64(Version))),
        )
            .prop_map(
                |(
                    (learner, step, blocks, tensors),
                    (partly, contents, weight, timeout_ms, lent),
                    (given_up, base),
                )| {
                    Message::Commit {
                        learner,
                        step,
                        blocks,
                        tensors,
                        partly,
                        contents,
                        weight,
                        timeout_ms,
                        lent,
                        given_up,
                        base,
                    }
                },
            )
            .boxed(),
        learner().prop_map(|learner| Message::Abort { learner }).boxed(),
        learner().prop_map(|learner| Message::Withdraw { learner }).boxed(),
        (vec(learner(), 0..5), life_sign())
            .prop_map(|(learners, sign)| Message::Touch { learners, sign })
            .boxed(),
        (text(), text()).prop_map(|(name, value)| Message::SetControl { name, value }).boxed(),
        (any::<u64>(), block_ranges(), any::<u32>(), proptest::option::of(id64(PlanId)), meta())
            .prop_map(|(token, blocks, timeout_ms, ahead, meta)| Message::Assign {
                token,
                blocks,
                timeout_ms,
                ahead,
                meta,
            })
            .boxed(),
        any::<u64>().prop_map(|token| Message::WithdrawAssign { token }).boxed(),
        (id64(PlanId), learner(), block())
            .prop_map(|(plan, learner, block)| Message::NonFiniteContribution { plan, learner, block })
            .boxed(),
        (id64(PlanId), proptest::option::of(learner()))
            .prop_map(|(plan, learner)| Message::SourceGone { plan, learner })
            .boxed(),
        (any::<u64>(), any::<u64>())
            .prop_map(|(request, newest)| Message::AckThrough { request, newest })
            .boxed(),
        job_state().prop_map(|state| Message::State(Box::new(state))).boxed(),
        (id64(PlanId), granted(), id64(PlanId))
            .prop_map(|(plan, payload, counted)| Message::Grant { plan, payload, counted })
            .boxed(),
        id64(PlanId).prop_map(|plan| Message::Over { plan }).boxed(),
        (learner(), reason()).prop_map(|(learner, reason)| Message::Left { learner, reason }).boxed(),
        (id64(PlanId), block(), form(), any::<bool>())
            .prop_map(|(plan, block, form, ahead)| Message::Push { plan, block, form, ahead })
            .boxed(),
        id64(PlanId).prop_map(|plan| Message::Probe { plan }).boxed(),
        (id64(PlanId), block_ranges()).prop_map(|(plan, blocks)| Message::Missing { plan, blocks }).boxed(),
        (id64(Version), range(), proptest::option::of(id64(Version)))
            .prop_map(|(version, blocks, base)| Message::Pull { version, blocks, base })
            .boxed(),
        (id64(Version), block()).prop_map(|(version, block)| Message::Block { version, block }).boxed(),
        plan().prop_map(|plan| Message::Start(Box::new(plan))).boxed(),
        id64(PlanId).prop_map(|plan| Message::Ready { plan }).boxed(),
        (id64(PlanId), id64(ClientId), block())
            .prop_map(|(plan, client, block)| Message::NonFinitePayload { plan, client, block })
            .boxed(),
        id64(PlanId).prop_map(|plan| Message::Conclude { plan }).boxed(),
        id64(PlanId).prop_map(|plan| Message::Drop { plan }).boxed(),
        Just(Message::Create).boxed(),
        (id64(Generation), block(), kept())
            .prop_map(|(generation, block, what)| Message::Load { generation, block, what })
            .boxed(),
        id64(Generation).prop_map(|generation| Message::Loaded { generation }).boxed(),
        (text(), id64(Generation))
            .prop_map(|(model, generation)| Message::Delete { model, generation })
            .boxed(),
        Just(Message::Status).boxed(),
        Just(Message::Text).boxed(),
        registry_request().prop_map(Message::Registry).boxed(),
        registry_answer().prop_map(Message::Registered).boxed(),
        any::<(u32, u64)>().prop_map(|(region, bytes)| Message::Share { region, bytes }).boxed(),
        any::<u32>().prop_map(|region| Message::Unshare { region }).boxed(),
        (id64(PlanId), block(), any::<(bool, bool, u32, u64)>())
            .prop_map(|(plan, block, (wide, ahead, region, offset))| Message::PushAt {
                plan,
                block,
                wide,
                ahead,
                region,
                offset,
            })
            .boxed(),
        (id64(Version), block(), any::<(u32, u64)>())
            .prop_map(|(version, block, (region, offset))| Message::BlockAt {
                version,
                block,
                region,
                offset,
            })
            .boxed(),
        Just(Message::Moved).boxed(),
        (text(), id64(Generation), shard(), any::<(u32, u32)>())
            .prop_map(|(model, generation, off, (timeout_ms, hold_ms))| Message::Move {
                model,
                generation,
                off,
                timeout_ms,
                hold_ms,
            })
            .boxed(),
        (any::<u64>(), shard()).prop_map(|(attempt, off)| Message::Prepare { attempt, off }).boxed(),
        (id64(Generation), any::<u64>(), id64(Version), reducer())
            .prop_map(|(generation, attempt, version, reducer)| Message::Fill {
                generation,
                attempt,
                version,
                reducer,
            })
            .boxed(),
        any::<(u32, u32)>().prop_map(|(blocks, of)| Message::Filled { blocks, of }).boxed(),
        (id64(Generation), id64(Epoch), id64(Version), block(), kept())
            .prop_map(|(generation, epoch, version, block, what)| Message::Fetch {
                generation,
                epoch,
                version,
                block,
                what,
            })
            .boxed(),
        Just(Message::Fetched).boxed(),
        (id64(Generation), any::<(u64, u64, u64, u64)>())
            .prop_map(|(generation, (attempt, at, of, now))| Message::HandOver {
                generation,
                attempt,
                at,
                of,
                now,
            })
            .boxed(),
        Just(Message::Switch).boxed(),
        (id64(Generation), any::<u64>())
            .prop_map(|(generation, attempt)| Message::Abandon { generation, attempt })
            .boxed(),
        any::<bool>().prop_map(|parked| Message::Park { parked }).boxed(),
        (text(), id64(Generation), shard())
            .prop_map(|(model, generation, off)| Message::StopMove { model, generation, off })
            .boxed(),
        (any::<u32>(), any::<u64>(), any::<u64>(), any::<u32>())
            .prop_map(|(region, bytes, address, key)| Message::ShareAt { region, bytes, address, key })
            .boxed(),
        (any::<u64>(), any::<u32>()).prop_map(|(address, key)| Message::Directory { address, key }).boxed(),
        (any::<u32>(), any::<u32>(), any::<u64>(), any::<u32>())
            .prop_map(|(count, bytes, address, key)| Message::Slots { count, bytes, address, key })
            .boxed(),
        (id64(PlanId), block(), any::<(bool, bool, u32)>())
            .prop_map(|(plan, block, (wide, ahead, slot))| Message::PushIn { plan, block, wide, ahead, slot })
            .boxed(),
        id64(PlanId).prop_map(|plan| Message::Torn { plan }).boxed(),
        (text(), id64(Generation), id64(Epoch))
            .prop_map(|(model, generation, epoch)| Message::Capture { model, generation, epoch })
            .boxed(),
        any::<u64>().prop_map(|snapshot| Message::Captured { snapshot }).boxed(),
        (id64(Generation), id64(Epoch), any::<(u64, u8, bool)>())
            .prop_map(|(generation, epoch, (snapshot, slots, holds))| Message::Pin {
                generation,
                epoch,
                snapshot,
                slots,
                holds,
            })
            .boxed(),
        id64(Version).prop_map(|version| Message::Pinned { version }).boxed(),
        (id64(Generation), id64(Version), any::<(u64, u8)>())
            .prop_map(|(generation, version, (snapshot, slots))| Message::Copy {
                generation,
                snapshot,
                version,
                slots,
            })
            .boxed(),
        (id64(Generation), any::<u64>(), block(), kept())
            .prop_map(|(generation, snapshot, block, what)| Message::FetchCopy {
                generation,
                snapshot,
                block,
                what,
            })
            .boxed(),
        (id64(Generation), any::<u64>())
            .prop_map(|(generation, snapshot)| Message::Release { generation, snapshot })
            .boxed(),
        id64(Generation).prop_map(|generation| Message::BeginAt { generation }).boxed(),
        id64(Version).prop_map(|version| Message::PullWhole { version }).boxed(),
        (id64(Version), any::<u32>())
            .prop_map(|(version, region)| Message::VersionAt { version, region })
            .boxed(),
        (learner(), id64(Step)).prop_map(|(learner, step)| Message::WholeBlock { learner, step }).boxed(),
        (id64(PlanId), squares()).prop_map(|(plan, squares)| Message::Measured { plan, squares }).boxed(),
        (id64(PlanId), proptest::option::of(id64(Version)))
            .prop_map(|(plan, base)| Message::Follow { plan, base })
            .boxed(),
        (id64(PlanId), block()).prop_map(|(plan, block)| Message::BlockAhead { plan, block }).boxed(),
        id64(PlanId).prop_map(|plan| Message::Begun { plan }).boxed(),
        any::<u64>().prop_map(|token| Message::WholeWeights { token }).boxed(),
        (id64(PlanId), vec((id64(ClientId), any::<u32>()), 0..4))
            .prop_map(|(plan, clients)| Message::Lacking { plan, clients })
            .boxed(),
        (learner(), vec(-1e9..1e9f64, 0..5), any::<u32>())
            .prop_map(|(learner, values, timeout_ms)| Message::AllReduce {
                learner,
                op: ReduceOp::Mean,
                values,
                timeout_ms,
            })
            .boxed(),
        vec(-1e9..1e9f64, 0..5).prop_map(|values| Message::AllReduced { values }).boxed(),
        (id64(Version), block(), id64(Version), any::<Option<u32>>())
            .prop_map(|(version, block, base, crc)| Message::Changes { version, block, base, crc })
            .boxed(),
        (id64(PlanId), block(), id64(Version), any::<Option<u32>>())
            .prop_map(|(plan, block, base, crc)| Message::ChangesAhead { plan, block, base, crc })
            .boxed(),
        (id64(Generation), id64(Version), id64(Version), block())
            .prop_map(|(generation, base, version, first)| Message::ChangedSince {
                generation,
                base,
                version,
                first,
            })
            .boxed(),
        proptest::option::of(block()).prop_map(|next| Message::ChangedBlocks { next }).boxed(),
        (text(), reader_does()).prop_map(|(name, does)| Message::Reader { name, does }).boxed(),
        id64(Version).prop_map(|version| Message::Staged { version }).boxed(),
        Just(Message::TellReaders).boxed(),
        (any::<(Option<u64>, u64)>(), vec(reader_state(), 0..4), vec(any::<u32>().prop_map(ReaderId), 0..3))
            .prop_map(|((since, revision), readers, gone)| Message::Readers {
                since,
                revision,
                readers,
                gone,
            })
            .boxed(),
        (text(), text(), text())
            .prop_map(|(address, zone, host)| Message::Relay { address, zone, host })
            .boxed(),
        (proptest::option::of(text()), any::<u32>())
            .prop_map(|(address, depth)| Message::PullVia { address, depth })
            .boxed(),
        text().prop_map(|address| Message::RelayFailed { address }).boxed(),
        (id64(Generation), id64(Version), proptest::option::of(id64(Version)), vec(strided(), 1..6))
            .prop_map(|(generation, version, base, parts)| Message::ReadParts {
                generation,
                version,
                base,
                parts,
            })
            .boxed(),
        any::<Option<u32>>().prop_map(|patched| Message::PartBytes { patched }).boxed(),
        (id64(PlanId), block(), id64(Version), any::<(u32, bool)>())
            .prop_map(|(plan, block, base, (crc, ahead))| Message::PushChanges {
                plan,
                block,
                base,
                crc,
                ahead,
            })
            .boxed(),
        (any::<u64>(), (text(), any::<(u32, u32, bool)>()), block_ranges(), any::<u32>(), meta())
            .prop_map(|(token, (set, (number, of, all)), blocks, timeout_ms, meta)| Message::AssignPart {
                token,
                part: PartOf { set, number, of, all },
                blocks,
                timeout_ms,
                meta,
            })
            .boxed(),
        (
            id64(Generation),
            id64(Epoch),
            id64(ClientId),
            any::<(u64, Option<(u64, u32)>)>(),
            vec(strided(), 1..6),
        )
            .prop_map(|(generation, epoch, client, (token, patched), parts)| Message::WritePart {
                generation,
                epoch,
                client,
                token,
                patched: patched.map(|(base, crc)| (Version(base), crc)),
                parts,
            })
            .boxed(),
        (id64(PlanId), shard_error()).prop_map(|(plan, why)| Message::Unmade { plan, why }).boxed(),
        (id64(Version), id64(Version))
            .prop_map(|(version, base)| Message::WhichChanged { version, base })
            .boxed(),
        (id64(Version), id64(Version), block_ranges())
            .prop_map(|(version, base, blocks)| Message::Unchanged { version, base, blocks })
            .boxed(),
        any::<u64>().prop_map(|token| Message::BeginWeights { token }).boxed(),
        (text(), id64(Generation), id64(Epoch), any::<u64>(), text(), any::<bool>())
            .prop_map(|(model, generation, epoch, snapshot, to, hurries)| Message::TakeSnapshot {
                model,
                generation,
                epoch,
                snapshot,
                to,
                hurries,
            })
            .boxed(),
        (id64(Generation), any::<u64>(), text(), text(), any::<bool>())
            .prop_map(|(generation, snapshot, to, before, hurries)| Message::SaveCopy {
                generation,
                snapshot,
                to,
                before,
                hurries,
            })
            .boxed(),
        (id64(Version), any::<(u64, u64, u64, bool)>())
            .prop_map(|(version, (dealt, of, written, ended))| Message::Saved {
                version,
                dealt,
                of,
                written,
                ended,
            })
            .boxed(),
        (id64(Generation), text(), text())
            .prop_map(|(generation, from, name)| Message::LoadCopy { generation, from, name })
            .boxed(),
        (id64(Version), any::<u64>(), vec(learner_record(), 0..4), any::<u32>().prop_map(Incarnation))
            .prop_map(|(version, contributions, learners, unlisted)| Message::Learners {
                version,
                contributions,
                learners,
                unlisted,
            })
            .boxed(),
        (id64(Generation), id64(ClientId), id64(Version), 0usize..3)
            .prop_map(|(generation, client, version, at)| Message::Offer {
                generation,
                client,
                version,
                brings: [Brings::Soon, Brings::Sent, Brings::Failed][at],
            })
            .boxed(),
        any::<bool>().prop_map(|wanted| Message::Offered { wanted }).boxed(),
    ]
}

pub(super) fn message() -> impl Strategy<Value = Message> {
    proptest::strategy::Union::new(each_message())
}

/// A frame's parts: message, request, epoch, and a payload that fits the message.
pub(super) fn any_frame() -> impl Strategy<Value = (Message, u64, Epoch, Vec<u8>)> {
    (message(), any::<u64>(), id64(Epoch), vec(any::<u8>(), 1..200)).prop_map(
        |(message, request, epoch, payload)| {
            let allowed = *message.payload_limits().end() as usize;
            (message, request, epoch, payload.into_iter().take(allowed).collect())
        },
    )
}
