//! The same tests of numbers with the state on a device, and a device that fails.

use std::sync::Arc;

use libmodelio::contributor::ContributeError;
use libmodelio::vocabulary::ids::Version;
use libmodelio::vocabulary::shard_error::ShardError;
use ps_backend::partition::executor::Pool;

use crate::common::{Job, gradient, on};
use test_devices::homes;
use test_devices::software_device::software;

/// Runs tests of `reducers` on each device.
macro_rules! on_devices {
    ($($test:ident),+ $(,)?) => {
        $(#[test]
        fn $test() {
            for accelerator in homes::devices() {
                on(Pool::start(2, Some(accelerator)).unwrap(), crate::reducers::$test);
            }
        })+
    };
}

on_devices! {
    synchronous_reducers_match_the_reference,
    asynchronous_reducers_match_the_reference,
    untouched_blocks_keep_their_value_over_many_versions,
    assigned_contributions_replace_everything_accumulated_or_not,
    accumulated_values_stay_when_the_last_learner_writes_nothing,
    assigned_contributions_hold_values_of_the_highest_learner_in_any_order,
    partly_written_blocks_count_zeros_or_keep_values,
    half_precision_accumulates_in_masters,
    new_weights_in_part_keep_the_rest_and_its_masters,
    a_change_of_reducer_starts_from_zero_state,
    a_setting_changed_in_mid_write_takes_effect_at_the_next_version,
    blocks_of_a_lone_learner_are_reduced_as_they_come,
}

#[test]
fn a_device_that_fails_is_named_to_the_learner() {
    let (device, accelerator) = software(1 << 30);
    let executor = Pool::start(2, Some(Arc::clone(&accelerator))).unwrap();
    let job = Job::on(executor, &[("reducer", "adam")]);
    let learner = job.join("a");
    learner.contribute(&gradient(&job.layout, 1)).unwrap();
    job.wait(&learner);
    let before = job.weights();
    device.fail_after(2);
    // The contribution counts before the version is made of it, so its commit may be answered well.
    let _ = learner.contribute(&gradient(&job.layout, 2));
    let error = learner.contribute(&gradient(&job.layout, 3)).unwrap_err();
    let is_named = match &error {
        ContributeError::Shard(ShardError::Lost(why)) => why.contains("a device in software has failed"),
        _ => false,
    };
    assert!(is_named, "{error}");
    assert_eq!(job.shard.version(), Version(1));
    assert!(job.weights() == before, "the last version stays");
}
