//! Every setting arrives from every source, and a value out of range is refused by name. The tests are the
//! same in builds with RDMA and without.

use std::collections::BTreeSet;

use super::super::cluster::{CLUSTER, MountConfig, ShardConfig};
use super::*;
use crate::config::Layer;

fn layers(pairs: &[(&'static str, &str)]) -> [Layer; 1] {
    let mut layer = CLUSTER.flags();
    for (key, value) in [("mount", "/mnt"), ("registry", "node1"), ("listen", "node2")] {
        layer.set(key, [value]);
    }
    for (key, value) in pairs {
        layer.set(key, [value]);
    }
    [layer]
}

fn shard(pairs: &[(&'static str, &str)]) -> Result<ShardConfig, Error> {
    ShardConfig::merge(&layers(pairs))
}

fn mount(pairs: &[(&'static str, &str)]) -> Result<MountConfig, Error> {
    MountConfig::merge(&layers(pairs))
}

/// A value of every setting that is not its default.
const OTHERS: &[(&str, &str)] = &[
    ("rdma_device", "mlx5_1/2"),
    ("rdma_gid_index", "3"),
    ("rdma_traffic_class", "104"),
    ("rdma_mtu", "1024"),
    ("rdma_inline", "0"),
    ("rdma_depth", "512"),
    ("rdma_report_every", "1"),
    ("rdma_queues", "4"),
    ("rdma_polling", "busy"),
    ("rdma_notice", "flag"),
    ("rdma_buffers", "own"),
    ("rdma_placement", "dynamic"),
    ("rdma_slots", "32"),
    ("rdma_arena", "1GiB"),
    ("rdma_shared_receives", "0"),
    ("rdma_reads", "4"),
    ("rdma_retries", "0"),
];

fn others() -> RdmaOptions {
    RdmaOptions {
        device: Some("mlx5_1".into()),
        port: Some(2),
        gid_index: Some(3),
        traffic_class: Some(104),
        mtu: Mtu::from_bytes(1024),
        inline: 0,
        depth: 512,
        report_every: 1,
        queues: 4,
        polling: Polling::Busy,
        shared_receives: 0,
        notice: Notice::Flag,
        buffers: Buffers::Own,
        placement: Placement::Dynamic,
        slots: 32,
        arena: 1 << 30,
        reads: 4,
        retries: 0,
    }
}

#[test]
fn unset_options_have_the_librarys_defaults() {
    let config = shard(&[]).unwrap();
    assert_eq!((config.rdma, config.rdma_port), (RdmaUse::Auto, None));
    assert_eq!(config.rdma_options, RdmaOptions::default());
    assert_eq!(mount(&[]).unwrap().rdma, RdmaOptions::default());
}

#[test]
fn every_setting_arrives_at_shards_and_mounts() {
    let known: BTreeSet<&str> = CLUSTER.names().filter(|name| name.starts_with("rdma_")).collect();
    let others: BTreeSet<&str> = OTHERS.iter().map(|(key, _)| *key).chain(["rdma_port"]).collect();
    assert_eq!(others, known);
    assert_eq!(shard(OTHERS).unwrap().rdma_options, self::others());
    assert_eq!(mount(OTHERS).unwrap().rdma, self::others());
    for (key, value) in OTHERS {
        assert_ne!(mount(&[(*key, *value)]).unwrap().rdma, RdmaOptions::default(), "{key}");
    }
    let config = shard(&[("rdma", "on"), ("rdma_port", "7071")]).unwrap();
    assert_eq!((config.rdma, config.rdma_port), (RdmaUse::On, Some(7071)));
    assert_eq!(shard(&[("rdma", "off")]).unwrap().rdma, RdmaUse::Off);
}

#[test]
fn values_out_of_range_are_refused_by_name() {
    let wrong: &[(&str, &[&str])] = &[
        ("rdma", &["yes", "On", ""]),
        ("rdma_port", &["-1", "65536", "rdma", ""]),
        ("rdma_device", &["", "/1", "mlx5_0/", "mlx5_0/0", "mlx5_0/256", "mlx5 0"]),
        ("rdma_gid_index", &["-1", "x", "1.5", "65536", "fe80::1", ""]),
        ("rdma_traffic_class", &["-1", "256", "0x68"]),
        ("rdma_mtu", &["0", "128", "1500", "8192", "1KiB"]),
        ("rdma_inline", &["-1", "4097", "128B"]),
        ("rdma_depth", &["0", "15", "1025"]),
        ("rdma_report_every", &["0", "1025"]),
        ("rdma_queues", &["0", "65"]),
        ("rdma_polling", &["Busy", "adaptive(50)", ""]),
        ("rdma_notice", &["imm"]),
        ("rdma_buffers", &["ring"]),
        ("rdma_placement", &["both", "Static"]),
        ("rdma_slots", &["0", "4097"]),
        ("rdma_arena", &["0", "1MiB", "65GiB", "64MB", "lots", "-1"]),
        ("rdma_shared_receives", &["-1", "65537"]),
        ("rdma_reads", &["0", "256"]),
        ("rdma_retries", &["-1", "8"]),
    ];
    assert_eq!(wrong.len(), CLUSTER.names().filter(|name| name.starts_with("rdma")).count());
    for (key, values) in wrong {
        for value in *values {
            let error = shard(&[(*key, *value)]).unwrap_err();
            let origin = format!("--{}: ", key.replace('_', "-"));
            assert!(error.message.starts_with(&origin), "{key}={value}: {}", error.message);
            assert!(error.hint.is_some(), "{key}={value}");
            assert_eq!(error.exit_code(), 2, "{key}={value}");
            if !matches!(*key, "rdma" | "rdma_port") {
                assert_eq!(mount(&[(*key, *value)]).unwrap_err().message, error.message);
            }
        }
    }
}

#[test]
fn complaints_say_what_to_do() {
    let hint = |key, value| shard(&[(key, value)]).unwrap_err().hint.unwrap();
    assert!(hint("rdma_gid_index", "first").contains("gradfs rdma devices"));
    assert!(hint("rdma_device", "mlx5_0/9999").contains("gradfs rdma devices"));
    assert_eq!(hint("rdma_placement", "both"), "use one of auto, static, dynamic");
    assert_eq!(hint("rdma_depth", "1"), "left out, it is 128");
}
