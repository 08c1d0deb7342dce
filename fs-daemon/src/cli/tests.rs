//! Every option reaches its configuration, and every example is understood.

use std::collections::BTreeSet;
use std::path::Path;

use libmodelio::vocabulary::controls::{Controls, SETTINGS};

use super::*;
use crate::config::{ModelSource, UP, UpConfig};

const CONFIG_VARIABLE: &str = "GRADFS_CONFIG";

fn up(arguments: &str, variables: &[(&str, &str)]) -> Result<UpConfig, Error> {
    let words = ["gradfs", "up"].into_iter().chain(arguments.split_whitespace());
    let (_, given) = parsed(words.map(OsString::from)).map_err(|e| Error::usage(e.to_string()))?;
    UpConfig::of(&given, variables.iter().map(|(k, v)| (k.into(), v.into())))
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_option_with_a_value_is_a_key_and_settings_are_those_of_a_job() {
    let keys: BTreeSet<&str> = UP.names().collect();
    let command = Cli::command();
    let up = command.find_subcommand("up").unwrap();
    let options: BTreeSet<&str> = up.get_arguments().map(|arg| arg.get_id().as_str()).collect();
    let on_the_line_alone = BTreeSet::from(["config", "background", "dry_run"]);
    assert_eq!(&options - &keys, on_the_line_alone);
    assert_eq!(&keys - &options, BTreeSet::from(["mount"]), "models and mount are one argument");
    for (setting, _) in SETTINGS.iter() {
        assert!(keys.contains(setting), "{setting} has no option");
    }
}

#[test]
fn the_last_path_is_the_mountpoint() {
    let config = up("a.safetensors b.safetensors /mnt", &[]).unwrap();
    assert_eq!(config.models.len(), 2);
    assert_eq!(config.mounting.mountpoint, Path::new("/mnt"));
    let config = up("--size 1GiB --dtype f16 --name x /mnt", &[]).unwrap();
    assert!(matches!(config.models[0].source, ModelSource::Blank { .. }));
    assert!(up("/mnt", &[]).is_err());
    assert!(up("", &[]).is_err());
    assert!(up("--size 1GiB a.safetensors /mnt", &[]).is_err());
}

#[test]
fn every_option_reaches_the_configuration() {
    let mut words =
        String::from("--size 1MiB --block-size 64KiB --threads 3 --allow-other --metrics [::1]:1 /mnt");
    let texts = [
        ("reducer", "adamw"),
        ("consistency", "sync"),
        ("learners", "4"),
        ("min_learners", "2"),
        ("lease", "2.5"),
        ("patience", "0"),
        ("linger", "0"),
        ("timeout", "7"),
        ("shard_patience", "9"),
        ("retain", "3"),
        ("max_versions", "9"),
        ("changes", "4"),
        ("delta", "off"),
        ("hold_for_readers", "1"),
        ("snapshot_to", "/shared/llama"),
        ("snapshot_every", "100"),
        ("snapshot_keep", "5"),
        ("snapshot_keep_every", "1h"),
        ("snapshot_full_every", "24"),
        ("on_loss", "fail"),
        ("pull", "on-demand"),
        ("read_own_step", "false"),
        ("nonfinite", "accept"),
        ("wire", "topk(0.5)"),
        ("learning_rate", "2e-3"),
        ("momentum", "0.5"),
        ("dampening", "0.25"),
        ("beta1", "0.8"),
        ("beta2", "0.9"),
        ("alpha", "0.5"),
        ("epsilon", "1e-6"),
        ("weight_decay", "0.1"),
        ("carry", "-0.5"),
        ("clip_norm", "1.5"),
        ("clip_value", "0.5"),
        ("loss_scale", "1024"),
        ("learning_rate_floor", "1e-5"),
        ("schedule", "cosine(100)"),
        ("warmup", "10"),
        ("schedule_start", "5"),
        ("aggregation", "sum"),
    ];
    for (key, text) in texts {
        words.push_str(&format!(" --{} {text}", key.replace('_', "-")));
    }
    words.push_str(" --deterministic");
    let config = up(&words, &[]).unwrap();
    let controls = Controls::default().with_all(texts.into_iter().chain([("deterministic", "true")]));
    assert_eq!(config.controls, controls.unwrap());
    let quorum = up("--size 1MiB --consistency quorum(3) /mnt", &[]).unwrap();
    assert_eq!(quorum.controls.get("consistency").as_deref(), Some("quorum(3)"));
    let aware = up("--size 1MiB --consistency grace(3,0.5) /mnt", &[]).unwrap();
    assert_eq!(aware.controls.get("consistency").as_deref(), Some("grace(3, 0.5)"));
    let aware = up("--size 1MiB --consistency async --staleness-aware /mnt", &[]).unwrap();
    assert!(aware.controls.staleness_aware && !config.controls.staleness_aware);
    for (key, text) in texts.into_iter().filter(|(key, _)| *key != "consistency") {
        let default = Controls::default();
        assert_ne!(default.get(key), config.controls.get(key), "{key} {text} is the default");
    }
    assert_eq!((config.block_size, config.mounting.threads), (64 << 10, 3));
    assert!(config.mounting.allow_other && !config.mounting.no_passthrough);
    assert_eq!(config.mounting.metrics.unwrap().to_string(), "[::1]:1");
}

#[test]
fn a_switch_can_be_turned_off_again() {
    let variables = [("GRADFS_ALLOW_OTHER", "1"), ("GRADFS_NO_PASSTHROUGH", "1")];
    let config = up("--size 1MiB /mnt", &variables).unwrap();
    assert!(config.mounting.allow_other && config.mounting.no_passthrough);
    let config = up("--size 1MiB --allow-other=false --no-passthrough=no /mnt", &variables).unwrap();
    assert!(!config.mounting.allow_other && !config.mounting.no_passthrough);
}

#[test]
fn the_file_is_found_by_flag_or_variable() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.toml");
    std::fs::write(&path, "size = '1MiB'\nmount = 'mnt'\nreducer = 'sum'").unwrap();
    let shown = path.to_str().unwrap();
    let config = up(&format!("--config {shown}"), &[]).unwrap();
    assert_eq!(config.mounting.mountpoint, directory.path().join("mnt"));
    let config = up("--reducer adam", &[(CONFIG_VARIABLE, shown)]).unwrap();
    assert_eq!(config.controls.get("reducer").as_deref(), Some("adam"));
    let error = up("--config /nonexistent", &[(CONFIG_VARIABLE, shown)]).unwrap_err();
    assert!(error.message.contains("/nonexistent"));
}

#[test]
fn rdma_devices_are_asked_for_and_commands_are_completed() {
    let parsed = |words: &str| Cli::try_parse_from(words.split(' ')).map(|cli| cli.command);
    for (words, asked) in [("gradfs rdma devices", false), ("gradfs rdma devices --json", true)] {
        let Ok(Command::Rdma(rdma::RdmaCommand::Devices { json })) = parsed(words) else {
            panic!("{words}");
        };
        assert_eq!(json, asked, "{words}");
    }
    assert_eq!(parsed("gradfs rdma device").unwrap_err().exit_code(), 2);
    let mut script = Vec::new();
    clap_complete::generate(clap_complete::Shell::Bash, &mut Cli::command(), "gradfs", &mut script);
    let script = String::from_utf8(script).unwrap();
    assert!(script.contains("gradfs__rdma__devices") || script.contains("gradfs__subcmd__rdma"));
    for word in ["--rdma-gid-index", "dynamic", "drain", "--advertise", "--transport", "--shards", "shm"] {
        assert!(script.contains(word), "{word}");
    }
}

#[test]
fn every_example_of_every_command_is_understood() {
    fn helps(command: &clap::Command, of: &str, all: &mut Vec<(String, String)>) {
        let path = format!("{of} {}", command.get_name()).trim_start().to_owned();
        let help = command.get_after_help().map(ToString::to_string);
        all.extend(help.map(|help| (path.clone(), help)));
        command.get_subcommands().for_each(|sub| helps(sub, &path, all));
    }
    let mut all = Vec::new();
    helps(&Cli::command(), "", &mut all);
    let commands: Vec<&str> = all.iter().map(|(command, _)| command.as_str()).collect();
    for wanted in
        ["gradfs", "gradfs up", "gradfs mount", "gradfs rdma devices", "gradfs unmount", "gradfs completions"]
    {
        assert!(commands.contains(&wanted), "{wanted} has no examples: {commands:?}");
    }
    for (command, help) in &all {
        // Examples are indented. Text behind a pipe and leading text belong to the shell.
        let lines = help
            .lines()
            .filter(|line| line.starts_with("    "))
            .filter_map(|line| line.find("gradfs ").map(|at| &line[at..]));
        let examples: Vec<&str> =
            lines.map(|line| line.split([';', '|', '>']).next().unwrap_or("").trim_end()).collect();
        assert!(
            examples.iter().any(|example| example.starts_with(&format!("{command} "))),
            "{command}: {examples:?}"
        );
        for example in examples {
            let words = example.replace("\"$(hostname -f)\"", "node3").replace('\'', "");
            if let Err(error) = Cli::try_parse_from(words.split_whitespace()) {
                panic!("{command}: {words}: {error}");
            }
        }
    }
}

#[test]
fn names_of_torchs_settings_are_understood() {
    let words = "--lr 3e-4 --wd 0.1 --reducer AdamW --dtype float32 --nonfinite Accept --size 1MiB /mnt";
    let config = up(words, &[]).unwrap();
    let controls = config.controls;
    for (key, value) in
        [("learning_rate", "0.0003"), ("weight_decay", "0.1"), ("reducer", "adamw"), ("nonfinite", "accept")]
    {
        assert_eq!(controls.get(key).as_deref(), Some(value));
    }
    assert!(up("--lr 1 --learning-rate 2 --size 1MiB /mnt", &[]).is_err(), "twice");
    let refused = up("--lr fast --size 1MiB /mnt", &[]).unwrap_err().message;
    assert!(refused.starts_with("--learning-rate: \"fast\""), "{refused}");
}

#[test]
fn wrong_words_are_refused() {
    assert!(up("--reducer SGD2 --size 1MiB /mnt", &[]).is_err());
    assert!(up("--frobnicate --size 1MiB /mnt", &[]).is_err());
    assert_eq!(parse(["gradfs", "down"].map(OsString::from)).unwrap_err(), 2);
}
