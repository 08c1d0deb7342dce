//! Every flag reaches its configuration, and every command explains itself.

use std::collections::BTreeSet;

use clap::{CommandFactory, FromArgMatches, Parser};
use libmodelio::transport::rdma::Notice;
use ps_backend::server::RdmaUse;

use super::*;
use crate::config::ModelSource;
use crate::config::cluster::{
    CLUSTER, CreateConfig as Create, DeleteConfig, DrainConfig, MountConfig as Mount,
    RegistryConfig as Registry, SaveConfig, SavedModel, ShardConfig as Shard, Shows, StatusConfig, StatusOf,
    Via,
};
use libmodelio::client::TransportChoice;
use libmodelio::transport::reactor::Choice;
use libmodelio::wire::Checksum;

/// The commands of a cluster, as they stand beside the others.
#[derive(Debug, Parser)]
#[command(name = "gradfs", max_term_width = 100)]
struct Line {
    #[command(subcommand)]
    command: ClusterCommand,
}

fn parsed(words: &str) -> Result<ClusterCommand, clap::Error> {
    let words = std::iter::once("gradfs").chain(words.split_whitespace());
    Line::try_parse_from(words).map(|line| line.command)
}

/// The configuration that a command line asks for, without any environment.
macro_rules! config {
    ($command:ident, $words:expr) => {
        config!($command, $words, &[])
    };
    ($command:ident, $words:expr, $variables:expr) => {{
        let variables: &[(&str, &str)] = $variables;
        let words: &str = $words;
        let words: Vec<String> = format!("gradfs {words}").split_whitespace().map(str::to_owned).collect();
        let matches = Line::command().try_get_matches_from(words).unwrap();
        let (_, given) = matches.subcommand().unwrap();
        CLUSTER.layers(given, variables.iter().map(|(k, v)| (k.into(), v.into()))).and_then(|layers| {
            match Line::from_arg_matches(&matches).unwrap().command {
                ClusterCommand::$command(args) => merge!($command, args, &layers),
                other => panic!("not {}: {other:?}", stringify!($command)),
            }
        })
    }};
}

macro_rules! merge {
    (Status, $args:ident, $layers:expr) => {
        StatusConfig::merge($args.of.as_deref(), $layers, $args.json)
    };
    (Save, $args:ident, $layers:expr) => {
        SaveConfig::merge(&$args, $layers)
    };
    (Delete, $args:ident, $layers:expr) => {
        DeleteConfig::merge(&$args.name, $args.snapshots, $layers)
    };
    (Drain, $args:ident, $layers:expr) => {
        DrainConfig::merge(&$args.shard, &$args.timeout, $args.hold.as_deref(), $args.cancel, $layers)
    };
    ($command:ident, $args:ident, $layers:expr) => {{
        drop($args);
        $command::merge($layers)
    }};
}

#[test]
fn every_command_has_help_with_examples() {
    let mut line = Line::command();
    let names: Vec<String> = line.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    assert_eq!(
        names,
        [
            "registry",
            "shard",
            "create",
            "mount",
            "status",
            "save",
            "snapshot",
            "snapshots",
            "verify",
            "delete",
            "drain"
        ]
    );
    for name in names {
        let help = line.find_subcommand_mut(&name).unwrap().render_long_help().to_string();
        assert!(help.contains("Examples:\n  "), "{help}");
        assert!(help.contains(&format!("gradfs {name} ")), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 100), "{help}");
    }
}

#[test]
fn settings_of_rdma_are_those_of_shards_and_mounts() {
    let line = Line::command();
    let flags = |name: &str| -> BTreeSet<String> {
        let all = line.find_subcommand(name).unwrap().get_arguments();
        let of_rdma = all.filter(|argument| argument.get_help_heading() == Some("RDMA"));
        of_rdma.map(|argument| argument.get_id().to_string()).collect()
    };
    let (mut of_shards, of_mounts) = (flags("shard"), flags("mount"));
    assert!(of_shards.remove("rdma") && of_shards.remove("rdma_port"));
    assert_eq!(of_shards, of_mounts);
    let keys = CLUSTER.names().filter(|name| name.starts_with("rdma_"));
    let keys: BTreeSet<String> = keys.map(str::to_owned).collect();
    assert_eq!(keys, &of_mounts | &BTreeSet::from(["rdma_port".to_owned()]));
}

#[test]
fn flags_reach_the_configuration() {
    let registry = config!(Registry, "registry --listen [::1]:1").unwrap();
    assert_eq!(registry.listen.to_string(), "[::1]:1");

    let words =
        "shard --listen 0.0.0.0:1 --advertise node2 --registry node1 --threads 3 --io uring --metrics node2";
    let shard = config!(Shard, words).unwrap();
    assert_eq!((shard.listen.port, shard.advertise.to_string()), (1, "node2:1".into()));
    assert_eq!(shard.registry.unwrap().to_string(), "node1:7070");
    assert_eq!((shard.threads, shard.io), (3, Choice::Uring));
    assert_eq!(shard.metrics.unwrap().to_string(), "node2:9464");
    let words = "shard --listen node1 --rdma on --rdma-port 7071 --rdma-device mlx5_0/2 --rdma-notice flag";
    let shard = config!(Shard, words).unwrap();
    assert_eq!((shard.rdma, shard.rdma_port), (RdmaUse::On, Some(7071)));
    assert_eq!((shard.rdma_options.port, shard.rdma_options.notice), (Some(2), Notice::Flag));
    let words = "mount /mnt --registry node1 --transport rdma --rdma-gid-index 3 --rdma-reads 4";
    let mount = config!(Mount, words).unwrap();
    assert_eq!(
        (mount.transport, mount.rdma.gid_index, mount.rdma.reads),
        (TransportChoice::Rdma, Some(3), 4)
    );

    assert_eq!(mount.shows, Shows::All);
    let shows = |words: &str| config!(Mount, &format!("mount /mnt --registry node1 {words}")).unwrap().shows;
    assert_eq!(shows("--views-only"), Shows::Views);
    assert_eq!(shows("--tensors a.* --tensors b"), Shows::Tensors(vec!["a.*".into(), "b".into()]));

    let words = "create llama --size 1GiB --dtype bf16 --registry node1 --shards 4 --block-size 64KiB \
                 --reducer adam --learners 2 --learning-rate 1e-3 --retain 2";
    let create = config!(Create, words).unwrap();
    assert_eq!((create.name.as_str(), create.shards, create.block_size), ("llama", Some(4), 64 << 10));
    assert_eq!((create.controls.learners, create.controls.retain), (2, 2));
    let create = config!(Create, "create llama --model a.safetensors --registry node1").unwrap();
    assert_eq!(create.source, ModelSource::File("a.safetensors".into()));

    let words = "mount /mnt/job a b --registry node1 --threads 4 --allow-other --no-passthrough \
                 --transport tcp --connections 5 --io poll --checksum off --metrics 0.0.0.0:0 \
                 --via auto --via-listen node2 --zone rack-1";
    let mount = config!(Mount, words).unwrap();
    assert_eq!((mount.mounting.mountpoint, mount.models), ("/mnt/job".into(), vec!["a".into(), "b".into()]));
    assert_eq!(
        (mount.mounting.threads, mount.mounting.allow_other, mount.mounting.no_passthrough),
        (4, true, true)
    );
    assert_eq!((mount.transport, mount.connections, mount.io), (TransportChoice::Tcp, 5, Choice::Poll));
    assert_eq!(mount.checksum, Checksum::Off);
    let listens = mount.via_listen.map(|listen| listen.to_string());
    assert_eq!(
        (mount.via, listens.as_deref(), &*mount.zone),
        (Some(Via::Auto), Some("node2:7071"), "rack-1")
    );
    assert_eq!(mount.mounting.metrics.unwrap().to_string(), "0.0.0.0:0");

    let status = config!(Status, "status --registry node1:9 --json").unwrap();
    assert_eq!((status.registry.process().unwrap().port, status.json, status.of), (9, true, StatusOf::All));
    let of = |words: &str| config!(Status, words).unwrap().of;
    assert_eq!(of("status llama"), StatusOf::Model("llama".into()));
    assert_eq!(of("status /mnt/job"), StatusOf::Mount("/mnt/job".into()));
    assert_eq!(of("status ./llama"), StatusOf::Mount("./llama".into()));
    let delete = config!(Delete, "delete llama --registry node1").unwrap();
    assert_eq!((delete.name.as_str(), delete.registry.process().unwrap().host.as_str()), ("llama", "node1"));
    let drain = config!(Drain, "drain node2:7 --registry node1").unwrap();
    assert_eq!((drain.shard.to_string().as_str(), drain.timeout.as_secs()), ("node2:7", 600));
    let drain = config!(Drain, "drain 3 --registry node1 --timeout 20").unwrap();
    assert_eq!((drain.shard.to_string().as_str(), drain.timeout.as_secs()), ("shard 3", 20));
    assert_eq!((drain.hold, drain.cancel), (None, false));
    let drain = config!(Drain, "drain 3 --registry node1 --hold 2.5").unwrap();
    assert_eq!(drain.hold, Some(std::time::Duration::from_millis(2500)));
    assert!(config!(Drain, "drain --cancel 3 --registry node1").unwrap().cancel);
}

#[test]
fn the_environment_makes_everything_short() {
    let registry = &[("GRADFS_REGISTRY", "node1")];
    assert_eq!(config!(Mount, "mount /mnt", registry).unwrap().registry.process().unwrap().host, "node1");
    assert_eq!(
        config!(Create, "create m --size 1MiB", registry).unwrap().registry.process().unwrap().host,
        "node1"
    );
    assert_eq!(config!(Status, "status", registry).unwrap().registry.process().unwrap().host, "node1");
    assert_eq!(config!(Delete, "delete m", registry).unwrap().registry.process().unwrap().host, "node1");
    let listen = &[("GRADFS_REGISTRY", "node1"), ("GRADFS_LISTEN", "node2")];
    assert_eq!(config!(Shard, "shard", listen).unwrap().advertise.host, "node2");
    // The command line must name the model to destroy.
    let name = &[("GRADFS_REGISTRY", "node1"), ("GRADFS_NAME", "m"), ("GRADFS_MODELS", "a,b")];
    assert_eq!(config!(Create, "create --size 1MiB", name).unwrap().name, "m");
    assert_eq!(config!(Mount, "mount /mnt", name).unwrap().models, ["a", "b"]);
    assert!(parsed("delete").is_err() && parsed("drain").is_err());
}

#[test]
fn wrong_words_are_refused_with_exit_code_2() {
    for words in [
        "shard --io epoll",
        "mount /mnt --transport ib",
        "shard --rdma maybe",
        "mount /mnt --rdma on",
        "mount /mnt --checksum crc",
        "registry --checksum off",
        "mount /mnt --rdma-polling never",
        "create m --reducer SGD2",
        "status node1 node2",
        "drain node1 node2",
        "drain 1 --cancel --hold 3",
        "serve",
    ] {
        let error = parsed(words).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{words}: {error}");
    }
    for words in [
        "drain 0 --registry n",
        "drain n:0 --registry n",
        "drain 1 --timeout 0 --registry n",
        "drain 1 --hold 0 --registry n",
    ] {
        assert_eq!(config!(Drain, words).unwrap_err().exit_code(), 2, "{words}");
    }
    // The same code finds values out of range, from every source.
    assert_eq!(parsed("create m --size 1MiB --shards 0 --registry n").unwrap_err().exit_code(), 2);
}

#[test]
fn save_takes_a_directory_of_a_mount_or_a_name() {
    let config: SaveConfig = config!(Save, "save --replace --piece-size 1MiB /mnt/job/llama there").unwrap();
    assert_eq!(config.model, SavedModel::Mounted("/mnt/job/llama".into()));
    assert_eq!((config.dir, config.piece_size, config.replaces), ("there".into(), 1 << 20, true));
    let config: SaveConfig = config!(Save, "save llama there --registry node1").unwrap();
    let SavedModel::Named(name, registry) = config.model else { panic!("{:?}", config.model) };
    assert_eq!((name.as_str(), registry.to_string().as_str()), ("llama", "node1:7070"));
    assert_eq!((config.piece_size, config.replaces), (5_000_000_000, false));
    let nothing = parsed("save --piece-size 0 llama there").unwrap_err().to_string();
    assert!(nothing.contains("--piece-size"), "{nothing}");
}
