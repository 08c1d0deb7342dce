//! Promises of a job, whichever way the bytes go: in this process, in shared memory, over TCP, by RDMA. Each test is
//! written once against the traits, does not ask which way it is on, and is run for every way under that way's name; those
//! that C has calls for are run by the C library as well; by RDMA with static placement, and what depends on it once more with dynamic placement and with flags.
//!
//! Ways by RDMA need an address that leads over a device in `GRADFS_RDMA_ADDRESS`; without, they are skipped, which is
//! said.

mod arithmetic;
mod c_abi;
mod devices;
mod early;
mod leavers;
mod members;
mod parts;
mod refusals;
mod rounds;
mod settings;
mod site;
mod steps;
mod tensors;
mod versions;
mod waits;
mod weights;
#[path = "../network/world.rs"]
#[allow(dead_code, reason = "what only the tests of a network use")]
mod world;

/// A module for each subject with its tests, on the way that the expression gives, if there is one.
macro_rules! on {
    ($way:expr, $($subject:ident: [$($test:ident),+ $(,)?],)+) => {
        $(mod $subject {
            $(#[test]
            fn $test() {
                if let Some(way) = $way {
                    crate::$subject::$test(&way);
                }
            })+
        })+
    };
}

/// All tests.
macro_rules! conforms {
    ($way:expr) => {
        on! {
            $way,
            devices: [
                each_path_reports_its_kind,
                memory_that_is_registered_is_the_same_at_both_ends,
                several_contribute_as_one_learner,
            ],
            members: [
                the_number_of_learners_is_limited,
                a_name_is_one_learners_at_a_time,
                strangers_are_unknown,
                the_status_shows_the_learners_of_the_job,
            ],
            steps: [
                steps_follow_each_other,
                contributions_of_several_ends_are_added,
                blocks_may_come_early_or_late_and_in_any_order,
                blocks_may_come_from_several_threads,
                a_contributor_may_write_at_any_offset,
                unsent_blocks_count_as_zero,
                a_block_that_is_offered_twice_counts_once,
                a_commit_that_is_sent_again_counts_once,
                a_learner_may_be_a_step_ahead,
                mapped_memory_is_committed_as_it_is,
            ],
            refusals: [
                blocks_that_do_not_fit_change_nothing,
                commits_that_make_no_sense_change_nothing,
                nan_is_refused_when_offered,
                nan_is_refused_at_the_commit,
                nan_is_refused_to_the_learner_who_brings_it,
                a_refused_block_fails_the_commit_whichever_thread_wrote_it,
                accepted_nan_counts,
            ],
            waits: [
                a_commit_that_waits_for_others_ends_at_its_deadline,
                waiting_for_a_step_ends_at_its_deadline,
                a_wait_is_withdrawn,
                an_aborted_contribution_is_dropped,
                a_contribution_that_is_aborted_while_its_commit_waits_is_dropped,
                an_end_that_shuts_down_answers_everybody,
                answers_may_call_the_job,
            ],
            leavers: [
                a_learner_that_leaves_in_mid_step_is_not_waited_for,
                the_committed_contribution_of_a_leaver_stays,
                a_learner_that_waits_for_a_leaver_gets_an_answer,
            ],
            versions: [
                a_pinned_version_stays_as_it_is,
                a_version_that_is_only_known_by_name_stops_no_training,
                no_read_is_torn,
                versions_are_opened_by_their_number_while_they_are_kept,
                any_range_can_be_read,
                listeners_hear_of_every_version,
            ],
            parts: [
                pieces_of_a_version_are_read_wherever_it_is,
                pieces_that_are_none_are_refused,
                pieces_of_versions_that_are_not_there_are_not_read,
            ],
            weights: [
                new_weights_appear_whole_everywhere,
                new_weights_wait_for_readers_of_all_ends,
                unwritten_bytes_keep_their_value,
                new_weights_come_first_and_committed_contributions_on_top,
                weights_can_be_written_only_when_the_job_allows_it,
                a_buffer_is_assigned_once,
                withdrawn_new_weights_count_wholly_or_not_at_all,
                buffers_are_bounded,
            ],
            settings: [
                settings_show_and_take_effect,
                bad_settings_change_nothing,
                async_makes_a_version_of_each,
                a_quorum_is_enough,
                the_lead_of_the_fastest_is_bounded,
                too_few_learners_stop_the_job,
            ],
            arithmetic: [
                halves_are_added_up_in_full_precision,
                reducers_compute_their_formulas,
                gradients_are_clipped_by_their_norm,
            ],
            tensors: [
                a_tensor_that_nobody_wrote_stays_as_it_is,
                adam_counts_its_steps_per_tensor,
                unwritten_parts_of_a_written_tensor_count_as_zero,
                a_mapping_writes_every_tensor,
                frozen_tensors_are_never_reduced,
                what_was_not_written_takes_no_part_in_assign,
                assigned_contributions_hold_values_of_the_highest_learner_in_any_order,
                values_that_a_mount_has_not_seen_yet_stay,
                values_in_too_many_pieces_are_refused,
            ],
            rounds: [random_rounds_count_exactly_once, learners_at_once_count_exactly_once],
        }
    };
}

mod in_process {
    conforms!(crate::site::Way::in_process());
}

/// The state is on a device in software, as it would be on a GPU.
mod in_process_on_device {
    conforms!(crate::site::Way::on_device());
}

/// What is so in one process alone.
macro_rules! alone {
    ($way:expr, $($more:tt)*) => {
        on! {
            $way,
            early: [
                blocks_are_reduced_before_any_learner_commits,
                a_learner_that_begins_anew_or_leaves_takes_its_blocks_along,
                blocks_of_the_last_learner_to_begin_are_reduced_as_they_come,
                final_bytes_of_mappings_are_reduced_before_fsync,
            ],
            $($more)*
        }
    };
}

mod alone {
    alone! {
        crate::site::Way::in_process(),
        waits: [a_commit_waits_for_a_buffer_that_readers_hold],
        weights: [new_weights_are_shown_where_they_were_written],
    }
}

mod alone_on_device {
    alone! {
        crate::site::Way::on_device(),
        devices: [a_device_that_fails_is_named_to_the_learner],
    }
}

mod shm {
    conforms!(crate::site::Way::shm());
}

mod tcp_io_uring {
    conforms!(crate::site::Way::tcp(libmodelio::transport::reactor::Choice::Auto));
}

mod tcp_plain {
    conforms!(crate::site::Way::tcp(libmodelio::transport::reactor::Choice::Poll));
}

/// The tests that ask for nothing but what C has calls for.
mod c_library {
    on! {
        crate::site::Way::c_abi(),
        members: [the_number_of_learners_is_limited, a_name_is_one_learners_at_a_time],
        steps: [contributions_of_several_ends_are_added, blocks_may_come_early_or_late_and_in_any_order],
        refusals: [nan_is_refused_at_the_commit, nan_is_refused_to_the_learner_who_brings_it],
        waits: [
            a_commit_that_waits_for_others_ends_at_its_deadline,
            waiting_for_a_step_ends_at_its_deadline,
            an_aborted_contribution_is_dropped,
        ],
        leavers: [the_committed_contribution_of_a_leaver_stays],
        versions: [no_read_is_torn, versions_are_opened_by_their_number_while_they_are_kept],
        weights: [
            new_weights_appear_whole_everywhere,
            new_weights_come_first_and_committed_contributions_on_top,
        ],
        settings: [
            settings_show_and_take_effect,
            bad_settings_change_nothing,
            async_makes_a_version_of_each,
            a_quorum_is_enough,
            the_lead_of_the_fastest_is_bounded,
        ],
        arithmetic: [
            halves_are_added_up_in_full_precision,
            reducers_compute_their_formulas,
            gradients_are_clipped_by_their_norm,
        ],
        rounds: [random_rounds_count_exactly_once, learners_at_once_count_exactly_once],
    }
}

/// The tests that depend on how blocks move. The others need not be run for each option of a path.
macro_rules! moves {
    ($way:expr) => {
        on! {
            $way,
            devices: [each_path_reports_its_kind, memory_that_is_registered_is_the_same_at_both_ends],
            steps: [
                contributions_of_several_ends_are_added,
                blocks_may_come_early_or_late_and_in_any_order,
                mapped_memory_is_committed_as_it_is,
            ],
            refusals: [nan_is_refused_at_the_commit, nan_is_refused_to_the_learner_who_brings_it],
            leavers: [a_learner_that_leaves_in_mid_step_is_not_waited_for],
            versions: [a_pinned_version_stays_as_it_is, no_read_is_torn],
            weights: [unwritten_bytes_keep_their_value],
            arithmetic: [halves_are_added_up_in_full_precision],
            tensors: [what_was_not_written_takes_no_part_in_assign],
        }
    };
}

mod rdma {
    use libmodelio::transport::rdma::{Notice, Placement};

    use crate::site::Way;

    /// Enough for four connections, and not more than is soon registered where devices are software.
    const ARENA: usize = 8 << 20;

    fn placed() -> Option<Way> {
        Way::rdma(|options| (options.arena, options.placement) = (ARENA, Placement::Static))
    }

    fn fetched() -> Option<Way> {
        Way::rdma(|options| (options.arena, options.placement) = (ARENA, Placement::Dynamic))
    }

    fn flags() -> Option<Way> {
        Way::rdma(|options| (options.arena, options.notice) = (ARENA, Notice::Flag))
    }

    mod placed {
        conforms!(crate::rdma::placed());
    }

    mod fetched {
        moves!(crate::rdma::fetched());
    }

    mod flags {
        moves!(crate::rdma::flags());
    }
}
