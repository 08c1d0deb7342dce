//! Defaults, precedence, and every way to get the configuration of a cluster wrong.

use std::path::Path;
use std::time::Duration;

use libmodelio::vocabulary::layout::DType;

use super::*;

fn flags(pairs: &[(&'static str, &str)]) -> Layer {
    let mut layer = CLUSTER.flags();
    for (key, value) in pairs {
        // A comma separates values, as nothing here holds one.
        layer.set(key, value.split(','));
    }
    layer
}

fn environment(pairs: &[(&str, &str)]) -> Layer {
    CLUSTER.environment(pairs.iter().map(|(k, v)| (k.into(), v.into())))
}

fn file(text: &str) -> Layer {
    CLUSTER.parse(Path::new("/etc/cluster.toml"), text).unwrap()
}

fn at(host: &str, port: u16) -> Endpoint {
    Endpoint { host: host.into(), port }
}

fn registry_at(host: &str, port: u16) -> RegistryAt {
    RegistryAt::Process(at(host, port))
}

fn shard(pairs: &[(&'static str, &str)]) -> Result<ShardConfig, Error> {
    ShardConfig::merge(&[flags(pairs)])
}

fn create(pairs: &[(&'static str, &str)]) -> Result<CreateConfig, Error> {
    let mut all = vec![("name", "m"), ("size", "1MiB"), ("registry", "node1")];
    all.extend_from_slice(pairs);
    CreateConfig::merge(&[flags(&all)])
}

fn mount(pairs: &[(&'static str, &str)]) -> Result<MountConfig, Error> {
    let mut all = vec![("mount", "/mnt"), ("registry", "node1")];
    all.extend_from_slice(pairs);
    MountConfig::merge(&[flags(&all)])
}

/// The text of an error, in one line with its hint.
fn said<T: std::fmt::Debug>(outcome: Result<T, Error>) -> String {
    let error = outcome.unwrap_err();
    assert_eq!(error.exit_code(), 2, "{}", error.message);
    let text = format!("{} ({})", error.message, error.hint.expect("what to do"));
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn snapshots_have_a_rate_of_a_mebibyte_at_least() {
    let rate = |text: &str| shard(&[("listen", "node1"), ("snapshot_rate", text)]);
    assert_eq!(rate("200MiB").unwrap().snapshot_rate, Some(200 << 20));
    assert_eq!(rate("1MiB").unwrap().snapshot_rate, Some(1 << 20));
    for text in ["1048575", "0", "fast"] {
        said(rate(text));
    }
}

#[test]
fn defaults() {
    let registry = RegistryConfig::merge(&[flags(&[("listen", "0.0.0.0")])]).unwrap();
    let (registry_of_etcd, state) = (None, None);
    let expected =
        RegistryConfig { listen: at("0.0.0.0", 7070), insecure: false, registry: registry_of_etcd, state };
    assert_eq!(registry, expected);
    assert_eq!(
        shard(&[("listen", "node1")]).unwrap(),
        ShardConfig {
            listen: at("node1", 7070),
            insecure: false,
            advertise: at("node1", 7070),
            registry: None,
            registry_state: None,
            metrics: None,
            stop_timeout: Duration::from_secs(60),
            snapshot_rate: None,
            threads: 2,
            state: StateCopies::Single,
            device: DeviceName::Cpu,
            io: Choice::Auto,
            checksum: Checksum::On,
            rdma: RdmaUse::Auto,
            rdma_port: None,
            rdma_options: RdmaOptions::default(),
        }
    );
    assert_eq!(
        create(&[]).unwrap(),
        CreateConfig {
            name: "m".into(),
            source: ModelSource::Blank { bytes: 1 << 20, dtype: DType::F32 },
            registry: registry_at("node1", 7070),
            shards: None,
            block_size: 256 << 10,
            controls: Controls::default(),
        }
    );
    assert_eq!(
        mount(&[]).unwrap(),
        MountConfig {
            mounting: crate::config::Mounting {
                with_files: None,
                mountpoint: "/mnt".into(),
                threads: 2,
                allow_other: false,
                permissions: crate::config::Permissions::default(),
                no_passthrough: false,
                metrics: None,
                nbd: None,
                insecure: false,
            },
            models: vec![],
            shows: Shows::All,
            registry: registry_at("node1", 7070),
            transport: TransportChoice::Auto,
            checksum: Checksum::On,
            connections: 2,
            io: Choice::Auto,
            rdma: RdmaOptions::default(),
            via: None,
            via_listen: None,
            zone: String::new(),
        }
    );
    let status = StatusConfig::merge(None, &[flags(&[])], true).unwrap();
    assert_eq!(
        status,
        StatusConfig { of: StatusOf::All, registry: registry_at("localhost", 7070), json: true }
    );
}

#[test]
fn one_file_serves_all_commands() {
    let text = "registry = 'node1'\nlisten = '0.0.0.0'\nadvertise = 'node2'\nthreads = 3\nname = 'llama'\n\
                model = 'llama.safetensors'\nreducer = 'adam'\nlearning_rate = 0.25\nmount = '/mnt/job'\n\
                models = ['llama', 'value']\ntransport = 'tcp'";
    let layers = [flags(&[]), environment(&[]), file(text)];
    assert_eq!(RegistryConfig::merge(&layers).unwrap().listen, at("0.0.0.0", 7070));
    assert_eq!(ShardConfig::merge(&layers).unwrap().advertise, at("node2", 7070));
    let create = CreateConfig::merge(&layers).unwrap();
    assert_eq!(create.source, ModelSource::File("/etc/llama.safetensors".into()));
    assert_eq!(create.controls.hyper.learning_rate, 0.25);
    let mount = MountConfig::merge(&layers).unwrap();
    assert_eq!((mount.models, mount.transport), (vec!["llama".into(), "value".into()], TransportChoice::Tcp));
    assert_eq!(StatusConfig::merge(None, &layers, false).unwrap().registry, registry_at("node1", 7070));
    assert_eq!(DeleteConfig::merge("x", false, &layers).unwrap().registry, registry_at("node1", 7070));
    assert_eq!(
        DrainConfig::merge("node2", "1", None, false, &layers).unwrap().shard,
        ShardName::At(at("node2", 7070))
    );
}

#[test]
fn unknown_keys_are_refused_by_name() {
    let error = |text| said(CLUSTER.parse(Path::new("cluster.toml"), text));
    assert_eq!(error("registri = 'x'"), "cluster.toml: unknown key registri (did you mean registry?)");
    assert!(error("replicas = 2").contains("gradfs COMMAND --help lists"));
    let twice = CLUSTER.parse(Path::new("cluster.toml"), "listen = ['a', 'b']").unwrap_err();
    assert_eq!(twice.message, "cluster.toml: listen must be a single value");
    // `gradfs up` has none of the options that only a cluster has.
    assert!(crate::config::UP.parse(Path::new("job.toml"), "registry = 'x'").is_err());
}

#[test]
fn a_registry_is_needed_where_there_is_something_to_ask() {
    let none = [flags(&[("mount", "/mnt"), ("name", "m"), ("size", "1MiB")])];
    for text in [
        said(MountConfig::merge(&none)),
        said(DeleteConfig::merge("m", false, &none)),
        said(DrainConfig::merge("node1", "1", None, false, &none)),
    ] {
        assert!(text.starts_with("no registry is given (") && text.contains("GRADFS_REGISTRY"), "{text}");
    }
    // These need no other host to ask.
    let here = registry_at("localhost", 7070);
    assert_eq!(CreateConfig::merge(&none).unwrap().registry, here);
    assert_eq!(StatusConfig::merge(None, &none, false).unwrap().registry, here);
    assert!(said(RegistryConfig::merge(&none)).starts_with("no address to listen on is given"));
    assert!(said(ShardConfig::merge(&none)).contains("--listen 10.0.0.1:7070"));
}

#[test]
fn addresses_are_checked_and_complaints_name_the_source() {
    let env = environment(&[("GRADFS_REGISTRY", "node1:seven")]);
    let text = said(StatusConfig::merge(None, &[flags(&[]), env], false));
    assert!(text.starts_with("GRADFS_REGISTRY: \"node1:seven\" is not host:port"), "{text}");
    let text = said(StatusConfig::merge(None, &[file("registry = '::1'")], false));
    assert!(
        text.starts_with("/etc/cluster.toml: registry: \"::1\"") && text.contains("[::1]:7070"),
        "{text}"
    );
    for bad in ["0.0.0.0", "[::]:7070", "node1:0", "", "node1:99999"] {
        let text = said(mount(&[("registry", bad)]));
        assert!(text.starts_with("--registry: "), "{bad}: {text}");
    }
    assert!(said(DrainConfig::merge("node1:0", "1", None, false, &[])).contains("port 0"));
    assert!(said(DrainConfig::merge("tcp://node1", "1", None, false, &[])).starts_with("SHARD: "));
}

#[test]
fn a_shard_says_where_it_is() {
    let config = shard(&[("listen", "0.0.0.0:7171"), ("advertise", "node2")]).unwrap();
    assert_eq!(config.advertise, at("node2", 7171));
    let config = shard(&[("listen", "0.0.0.0"), ("advertise", "node2:9")]).unwrap();
    assert_eq!((config.listen.port, config.advertise.port), (7070, 9));
    let config = shard(&[("listen", "127.0.0.1:0")]).unwrap();
    assert_eq!((config.listen.port, config.advertise), (0, at("127.0.0.1", 0)));

    assert!(said(shard(&[("listen", "0.0.0.0")])).contains("add --advertise HOST"));
    assert!(said(shard(&[("listen", "[::]")])).contains("add --advertise HOST"));
    assert!(said(shard(&[("listen", "node2"), ("advertise", "0.0.0.0")])).starts_with("--advertise: "));
    assert!(said(shard(&[("listen", "node2"), ("advertise", "node2:0")])).contains("port 0"));
}

#[test]
fn a_shard_whose_own_address_is_the_registrys_becomes_the_registry() {
    let file = file("registry = 'node1'\nlisten = '0.0.0.0'");
    let on = |host: &str| ShardConfig::merge(&[flags(&[("advertise", host)]), file.clone()]).unwrap();
    assert_eq!(on("node1").registry, None);
    assert_eq!(on("node1:7070").registry, None);
    assert_eq!(on("node2").registry, Some(registry_at("node1", 7070)));
    // Another port of the same host is another process.
    assert_eq!(on("node1:7071").registry, Some(registry_at("node1", 7070)));
    assert_eq!(shard(&[("listen", "node1"), ("registry", "node1:7070")]).unwrap().registry, None);

    // Under another name, which only looking it up can tell.
    let all = shard(&[("listen", "0.0.0.0"), ("advertise", "node1")]).unwrap();
    assert!(
        all.is_the_registry(&registry_at("127.0.0.1", 7070))
            && all.is_the_registry(&registry_at("localhost", 7070))
    );
    assert!(!all.is_the_registry(&registry_at("127.0.0.1", 7071)), "another port");
    assert!(!all.is_the_registry(&registry_at("192.0.2.1", 7070)), "another host");
    let one = shard(&[("listen", "127.0.0.2"), ("advertise", "127.0.0.3:7171")]).unwrap();
    assert!(
        one.is_the_registry(&registry_at("127.0.0.2", 7070))
            && one.is_the_registry(&registry_at("127.0.0.3", 7171))
    );
    assert!(!one.is_the_registry(&registry_at("127.0.0.1", 7070)), "it does not listen there");
}

#[test]
fn a_model_is_of_a_file_or_blank() {
    let of = |pairs: &[(&'static str, &str)]| CreateConfig::merge(&[flags(pairs)]);
    let file = ("model", "a.safetensors");
    let to = ("registry", "node1");
    assert_eq!(of(&[("name", "m"), file, to]).unwrap().source, ModelSource::File("a.safetensors".into()));
    assert!(said(of(&[("name", "m"), to])).contains("--model FILE"));
    assert!(said(of(&[("name", "m"), file, ("size", "1MiB"), to])).contains("exclude each other"));
    assert!(said(of(&[("name", "m"), file, ("dtype", "f16"), to])).contains("--dtype is of no use"));
    assert!(said(of(&[file, to])).contains("gradfs create NAME"));
    assert!(said(create(&[("size", "7")])).contains("not a multiple"));
    assert!(said(create(&[("dtype", "int8")])).starts_with("--dtype: "));
    assert!(said(create(&[("block_size", "1000")])).starts_with("--block-size: "));
}

#[test]
fn names_are_checked() {
    for bad in ["", ".", "..", "a/b", "README"] {
        assert!(said(create(&[("name", bad)])).contains("cannot name a model"), "{bad:?}");
        assert!(said(mount(&[("models", bad)])).contains("cannot name a model"), "{bad:?}");
        assert!(said(DeleteConfig::merge(bad, false, &[])).contains("cannot name a model"), "{bad:?}");
    }
    assert!(said(mount(&[("models", "a,b,a")])).contains("a is named twice"));
    let many: Vec<String> = (0..300).map(|i| format!("m{i}")).collect();
    assert!(said(mount(&[("models", &many.join(","))])).contains("300 models"));
    assert!(said(mount(&[("mount", "")])).contains("gradfs mount /mnt/job"));
}

#[test]
fn numbers_and_words_are_checked() {
    for bad in ["0", "-1", "1025", "all", ""] {
        assert!(said(create(&[("shards", bad)])).starts_with("--shards: "), "{bad}");
    }
    assert_eq!(create(&[("shards", "8")]).unwrap().shards, Some(8));
    assert!(said(shard(&[("listen", "node1"), ("threads", "0")])).contains("contributions"));
    assert!(said(mount(&[("threads", "999")])).contains("filesystem"));
    for bad in ["0", "17", "many"] {
        assert!(said(mount(&[("connections", bad)])).contains("carry blocks"), "{bad}");
    }
    assert!(said(mount(&[("io", "epoll")])).contains("auto, uring, poll"));
    assert!(said(mount(&[("transport", "ib")])).contains("auto, tcp, shm, rdma"));
    assert!(said(mount(&[("checksum", "maybe")])).contains("on, off"));
    assert_eq!(mount(&[("checksum", "off")]).unwrap().checksum, Checksum::Off);
    assert_eq!(shard(&[("listen", "node1"), ("checksum", "off")]).unwrap().checksum, Checksum::Off);
    assert_eq!(mount(&[("transport", "rdma")]).unwrap().transport, TransportChoice::Rdma);
    assert!(said(mount(&[("allow_other", "maybe")])).starts_with("--allow-other: "));
    let config = mount(&[("io", "uring"), ("transport", "shm"), ("no_passthrough", "true")]).unwrap();
    assert_eq!((config.io, config.transport), (Choice::Uring, TransportChoice::SharedMemory));
    assert!(config.mounting.no_passthrough);
}

#[test]
fn a_mount_says_from_whom_it_pulls_and_where_others_pull_from_it() {
    let config =
        mount(&[("via", "auto"), ("via_listen", "10.0.0.1:9"), ("zone", "rack-1"), ("insecure", "true")]);
    let config = config.unwrap();
    assert_eq!((config.via, config.via_listen), (Some(Via::Auto), Some(at("10.0.0.1", 9))));
    assert_eq!((&*config.zone, config.mounting.insecure), ("rack-1", true));
    assert_eq!(mount(&[("via", "node3")]).unwrap().via, Some(Via::At(at("node3", 7071))));
    let config = mount(&[("via", "node3:5"), ("via_listen", "127.0.0.1")]).unwrap();
    assert_eq!((config.via, config.via_listen), (Some(Via::At(at("node3", 5))), Some(at("127.0.0.1", 7071))));
    for bad in ["", "node3:0", "0.0.0.0:1", "tcp://node3"] {
        assert!(said(mount(&[("via", bad)])).starts_with("--via: "), "{bad}");
    }
    for bad in ["", "a b", &"z".repeat(65)] {
        assert!(said(mount(&[("via", "auto"), ("zone", bad)])).starts_with("--zone: "), "{bad}");
    }
    assert!(said(mount(&[("via_listen", "node1")])).contains("--via auto"));
    assert!(said(mount(&[("via", "node3"), ("zone", "a")])).contains("--via auto"));
    let error = mount(&[("via", "node3"), ("insecure", "true")]).unwrap_err();
    assert!(error.message.contains("there is neither"), "{}", error.message);
}

#[test]
fn only_its_own_flag_opens_the_block_devices_of_a_mount() {
    let shared =
        || file("insecure = true\nlisten = \"0.0.0.0\"\nregistry = \"node1\"\nnbd = \"0.0.0.0:10809\"");
    assert!(ShardConfig::merge(&[flags(&[("advertise", "node2")]), shared()]).unwrap().insecure);
    let mount = |given: &[(&'static str, &str)], others: Layer| {
        let given: Vec<_> = [("mount", "/mnt")].iter().chain(given).copied().collect();
        MountConfig::merge(&[flags(&given), others]).unwrap().mounting.insecure
    };
    assert!(!mount(&[], shared()));
    assert!(!mount(&[], environment(&[("GRADFS_INSECURE", "true"), ("GRADFS_REGISTRY", "node1")])));
    assert!(mount(&[("insecure", "true")], shared()));
}

#[test]
fn a_registry_in_etcd_is_named_by_its_members() {
    let url = "etcd://a:2379,b:2379,c:2379/train";
    let layer = || {
        let mut layer = CLUSTER.flags();
        layer.set("registry", [url]);
        layer.set("listen", ["node1"]);
        layer
    };
    let config = ShardConfig::merge(&[layer()]).unwrap();
    let registry = config.registry.clone().unwrap();
    assert_eq!(registry.to_string(), url);
    assert!(!config.is_the_registry(&registry), "no shard is");
    assert_eq!(RegistryConfig::merge(&[layer()]).unwrap().registry, Some(registry));
    let mut kept = layer();
    kept.set("registry_state", ["/state"]);
    assert!(said(RegistryConfig::merge(&[kept])).contains("keeps it itself"));
    let of_process = file("registry = 'node1'\nlisten = 'node1'\nregistry_state = 'state'");
    let config = RegistryConfig::merge(&[of_process]).unwrap();
    assert_eq!((config.registry, config.state), (None, Some("/etc/state".into())));
    let process = flags(&[("listen", "node1"), ("registry", "node2")]);
    assert!(
        said(RegistryConfig::merge(&[process])).starts_with("--registry node2:7070: gradfs registry serves")
    );
    for (bad, why) in
        [("etcd://", "no host:port"), ("etcd://u:p@a", "GRADFS_ETCD_USER"), ("etcd://a:x", "no number")]
    {
        let text = said(mount(&[("registry", bad)]));
        assert!(text.starts_with("--registry: ") && text.contains(why), "{text}");
    }
}
