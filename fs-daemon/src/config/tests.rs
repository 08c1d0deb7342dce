//! Precedence, defaults, and every way to get a configuration wrong.

use super::*;
use std::ffi::OsString;
use std::path::Path;

fn flags(pairs: &[(&'static str, &str)]) -> Layer {
    let mut layer = UP.flags();
    for (key, value) in pairs {
        // A comma separates values, as nothing here holds one.
        layer.set(key, value.split(','));
    }
    layer
}

fn environment(pairs: &[(&str, &str)]) -> Layer {
    UP.environment(pairs.iter().map(|(k, v)| (k.into(), v.into())))
}

fn file(text: &str) -> Layer {
    UP.parse(Path::new("/etc/job.toml"), text).unwrap()
}

/// A configuration of a blank model with these flags in addition.
fn blank(pairs: &[(&'static str, &str)]) -> Result<UpConfig, Error> {
    let mut all = vec![("mount", "/mnt"), ("size", "1MiB")];
    all.extend_from_slice(pairs);
    UpConfig::merge(&[flags(&all)])
}

fn setting(config: &UpConfig, name: &str) -> String {
    config.controls.get(name).unwrap()
}

/// The message and hint with which these flags are refused.
fn refused(pairs: &[(&'static str, &str)]) -> String {
    let error = blank(pairs).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{}", error.message);
    format!("{} ({})", error.message, error.hint.unwrap_or_default())
}

#[test]
fn defaults() {
    let config = blank(&[]).unwrap();
    assert_eq!(
        config,
        UpConfig {
            mounting: Mounting {
                with_files: None,
                mountpoint: "/mnt".into(),
                threads: 2,
                allow_other: false,
                permissions: Permissions::default(),
                no_passthrough: false,
                metrics: None,
                nbd: None,
                insecure: false,
            },
            models: vec![ModelSpec {
                name: "model".into(),
                source: ModelSource::Blank { bytes: 1 << 20, dtype: DType::F32 },
            }],
            block_size: 256 << 10,
            controls: Controls::default(),
            state: StateCopies::Single,
            device: DeviceName::Cpu,
            owns_store: false,
        }
    );
    assert_eq!(blank(&[("state_copies", "double")]).unwrap().state, StateCopies::Double);
    assert!(refused(&[("state_copies", "triple")]).contains("single, double"));
    assert_eq!(blank(&[("device", "cuda:2")]).unwrap().device, DeviceName::Cuda(2));
    assert!(refused(&[("device", "gpu")]).contains("--device: \"gpu\" is no device: use cpu, or cuda:0"));
    assert_eq!(blank(&[("device", "cpu"), ("state_copies", "double")]).unwrap().state, StateCopies::Double);
    let both = refused(&[("device", "cuda:0"), ("state_copies", "double")]);
    assert!(both.contains("--device cuda:0 with --state-copies double"), "{both}");
    assert_eq!(setting(&config, "reducer"), "sgd");
    assert_eq!(setting(&config, "consistency"), "sync");
}

#[test]
fn flags_beat_environment_beats_file_beats_default() {
    let flag = flags(&[("mount", "/mnt"), ("size", "1MiB"), ("learning_rate", "1")]);
    let env = environment(&[("GRADFS_LEARNING_RATE", "2"), ("GRADFS_REDUCER", "adam")]);
    let toml = file("learning_rate = 3.0\nreducer = 'sum'\nthreads = 5\nsize = '4MiB'\nmount = 'x'");
    let config = UpConfig::merge(&[flag, env.clone(), toml.clone()]).unwrap();
    assert_eq!(setting(&config, "learning_rate"), "1");
    assert_eq!(setting(&config, "reducer"), "adam");
    assert_eq!(setting(&config, "consistency"), "sync");
    assert_eq!(config.mounting.threads, 5);
    assert_eq!(config.mounting.mountpoint, Path::new("/mnt"));
    assert!(matches!(config.models[0].source, ModelSource::Blank { bytes: 0x10_0000, .. }));

    let config = UpConfig::merge(&[UP.flags(), env, toml.clone()]).unwrap();
    assert_eq!(setting(&config, "learning_rate"), "2");
    assert_eq!(config.mounting.mountpoint, Path::new("/etc/x"));

    let config = UpConfig::merge(&[UP.flags(), environment(&[]), toml]).unwrap();
    assert_eq!(setting(&config, "learning_rate"), "3");
}

#[test]
fn complaints_name_the_source() {
    let env = environment(&[("GRADFS_THREADS", "many")]);
    let toml = file("mount = '/mnt'\nsize = '1MiB'");
    let error = UpConfig::merge(&[UP.flags(), env, toml]).unwrap_err();
    assert!(error.message.starts_with("GRADFS_THREADS: \"many\""), "{}", error.message);
    let toml = file("mount = '/mnt'\nsize = '1MiB'\nblock_size = 1000");
    let error = UpConfig::merge(&[toml]).unwrap_err();
    assert!(error.message.starts_with("/etc/job.toml: block_size: 1000"), "{}", error.message);

    // The error names the source of the setting that counts.
    let flag = flags(&[("mount", "/mnt"), ("size", "1MiB"), ("learning_rate", "fast")]);
    let env = environment(&[("GRADFS_LEARNING_RATE", "faster"), ("GRADFS_REDUCER", "magic")]);
    let toml = file("learning_rate = 'fastest'");
    let refused = |layers: &[Layer]| UpConfig::merge(layers).unwrap_err().message;
    let message = refused(&[flag, toml.clone()]);
    assert!(message.starts_with("--learning-rate: \"fast\" is not"), "{message}");
    let message = refused(&[UP.flags(), env, toml.clone()]);
    assert!(message.starts_with("GRADFS_REDUCER: \"magic\" is not"), "{message}");
    let message = refused(&[UP.flags(), toml]);
    assert!(message.starts_with("/etc/job.toml: learning_rate: \"fastest\" is not"), "{message}");
}

#[test]
fn models_are_named_after_their_files() {
    let layer = flags(&[("mount", "/mnt"), ("models", "a.safetensors,/x/b.v2.safetensors")]);
    let config = UpConfig::merge(&[layer]).unwrap();
    let names: Vec<_> = config.models.iter().map(|model| model.name.as_str()).collect();
    assert_eq!(names, ["a", "b.v2"]);
    assert_eq!(config.models[1].source, ModelSource::File("/x/b.v2.safetensors".into()));
}

#[test]
fn names_are_checked() {
    assert_eq!(blank(&[("name", "llama")]).unwrap().models[0].name, "llama");
    for bad in ["", ".", "..", "a/b", "a\nb", "a\0b"] {
        assert!(refused(&[("name", bad)]).contains("cannot name a model"), "{bad:?}");
    }
    assert!(refused(&[("name", &"x".repeat(256))]).contains("longer than 255"));
    assert!(blank(&[("name", &"x".repeat(255))]).is_ok());
    assert!(refused(&[("name", "a,b")]).contains("2 name(s) for 1 model(s)"));

    let files = ("models", "x/a.safetensors,y/a.safetensors");
    let config = UpConfig::merge(&[flags(&[("mount", "/mnt"), files])]).unwrap();
    let names: Vec<_> = config.models.iter().map(|model| &model.name).collect();
    assert_eq!(names, ["x", "y"], "as their directories");
    let same = ("models", "x/a.safetensors,z/x/a.safetensors");
    let error = UpConfig::merge(&[flags(&[("mount", "/mnt"), same])]).unwrap_err();
    assert_eq!(error.message, "two models are called x");
    let config = UpConfig::merge(&[flags(&[("mount", "/mnt"), files, ("name", "one,two")])]).unwrap();
    assert_eq!(config.models[1].name, "two");
}

#[test]
fn files_and_blank_exclude_each_other() {
    assert!(refused(&[("models", "a.safetensors")]).contains("exclude each other"));
    // But a flag overrides what the file of settings says.
    let toml = file("size = '1MiB'\ndtype = 'bf16'\nmount = '/mnt'");
    let config = UpConfig::merge(&[flags(&[("models", "a.safetensors")]), toml.clone()]).unwrap();
    assert_eq!(config.models[0].name, "a");
    let error = UpConfig::merge(&[flags(&[("models", "a.safetensors"), ("dtype", "f16")]), toml]);
    assert!(error.unwrap_err().message.contains("--dtype is of no use"));
}

#[test]
fn a_model_and_a_mountpoint_are_needed() {
    let error = UpConfig::merge(&[flags(&[("mount", "/mnt")])]).unwrap_err();
    assert_eq!(error.message, "no model is given");
    let error = UpConfig::merge(&[flags(&[("size", "1MiB")])]).unwrap_err();
    assert_eq!(error.message, "no mountpoint is given");
    let error = UpConfig::merge(&[flags(&[("size", "1MiB"), ("mount", "")])]).unwrap_err();
    assert_eq!(error.message, "no mountpoint is given");
    let error = UpConfig::merge(&[flags(&[("models", "a"), ("mount", "b.safetensors")])]).unwrap_err();
    assert!(error.message.contains("looks like a model"), "{}", error.message);
}

#[test]
fn sizes() {
    for (text, bytes) in [
        ("1048576", 1 << 20),
        ("256KiB", 256 << 10),
        ("256 kib", 256 << 10),
        ("64K", 64 << 10),
        ("1GiB", 1 << 30),
        ("2t", 2 << 40),
        ("1_000B", 1000),
        ("0", 0),
    ] {
        assert_eq!(size(text).unwrap(), bytes, "{text}");
    }
    for bad in ["", "GiB", "-1", "1.5GiB", "1e9", "0x10", "1GiBs", "ten", "_", "1 2"] {
        let error = size(bad).unwrap_err();
        assert!(error.message.contains("not a size"), "{bad}: {}", error.message);
    }
    assert!(size("1GB").unwrap_err().message.contains("two meanings"));
    for huge in ["9223372036854775808", "8388608TiB", "99999999TiB"] {
        assert!(size(huge).unwrap_err().message.contains("more than a file"), "{huge}");
    }
    assert!(size("99999999999999999999").is_err());
}

#[test]
fn blank_models_have_whole_elements() {
    let config = UpConfig::merge(&[flags(&[("mount", "/m"), ("size", "6"), ("dtype", "bf16")])]).unwrap();
    assert_eq!(config.models[0].source, ModelSource::Blank { bytes: 6, dtype: DType::BF16 });
    for (size, dtype, says) in [
        ("6", "f32", "4 bytes is"),
        ("3", "f32", "4 bytes is"),
        ("5", "f16", "4 bytes is"),
        ("0", "f32", "empty"),
    ] {
        let message = refused(&[("size", size), ("dtype", dtype)]);
        assert!(message.contains(says), "{message}");
    }
    assert!(refused(&[("dtype", "f8")]).contains("f32, f64, f16, bf16"));
    for (text, dtype) in [
        ("float32", DType::F32),
        ("FP32", DType::F32),
        ("half", DType::F16),
        ("float16", DType::F16),
        ("bfloat16", DType::BF16),
        ("torch.bfloat16", DType::BF16),
        ("fp8_e4m3", DType::E4M3),
        ("torch.float8_e4m3fn", DType::E4M3),
        ("F8_E5M2", DType::E5M2),
        ("float8_e5m2", DType::E5M2),
    ] {
        let source = ModelSource::Blank { bytes: 1 << 20, dtype };
        assert_eq!(blank(&[("dtype", text)]).unwrap().models[0].source, source, "{text}");
    }
    assert!(refused(&[("size", "512TiB"), ("block_size", "64KiB")]).contains("--block-size"));
}

#[test]
fn block_sizes() {
    for (text, bytes) in [("64KiB", 64 << 10), ("4MiB", 4 << 20), ("1048576", 1 << 20)] {
        assert_eq!(blank(&[("block_size", text)]).unwrap().block_size, bytes);
    }
    for bad in ["32KiB", "8MiB", "100KiB", "0", "65537"] {
        assert!(refused(&[("block_size", bad)]).contains("power of two"), "{bad}");
    }
    assert!(refused(&[("block_size", "large")]).contains("not a size"));
}

#[test]
fn threads_and_switches() {
    assert_eq!(blank(&[("threads", "8")]).unwrap().mounting.threads, 8);
    for bad in ["0", "-1", "257", "1.5", ""] {
        assert!(refused(&[("threads", bad)]).contains("whole number"), "{bad}");
    }
    assert!(blank(&[("no_passthrough", "true")]).unwrap().mounting.no_passthrough);
    assert!(blank(&[("allow_other", "yes")]).unwrap().mounting.allow_other);
    assert!(!blank(&[("allow_other", "0")]).unwrap().mounting.allow_other);
    assert!(refused(&[("allow_other", "maybe")]).contains("true or false"));
}

#[test]
fn owners_and_masks() {
    let of = |pairs| blank(pairs).unwrap().mounting.permissions;
    assert_eq!(of(&[]), Permissions::default());
    let set = Permissions { uid: Some(1000), gid: Some(0), umask: Some(0o027) };
    assert_eq!(of(&[("uid", "1000"), ("gid", "root"), ("umask", "027")]), set);
    assert!(refused(&[("uid", "no-such-user")]).contains("no user"));
    assert!(refused(&[("gid", "-1")]).contains("no group"));
    for bad in ["8", "1777", "u=rwx", ""] {
        assert!(refused(&[("umask", bad)]).contains("octal"), "{bad}");
    }
}

#[test]
fn settings_are_passed_on_and_sanity_checked() {
    let config = blank(&[("learning_rate", "1e-3"), ("learners", "4"), ("min_learners", "2")]).unwrap();
    assert_eq!(setting(&config, "learning_rate"), "0.001");
    assert_eq!(setting(&config, "learners"), "4");
    for (key, bad) in [
        ("learning_rate", "fast"),
        ("learning_rate", "inf"),
        ("beta1", "NaN"),
        ("learners", "0"),
        ("learners", "-2"),
        ("min_learners", "0"),
        ("lease", "-1"),
        ("lease", "inf"),
        ("timeout", "NaN"),
        ("timeout", "5s"),
        ("retain", "-1"),
        ("max_versions", "0"),
        ("reducer", "SGD2"),
        ("consistency", "eventual"),
        ("aggregation", "max"),
        ("nonfinite", "ignore"),
        ("wire", "int4"),
    ] {
        let message = refused(&[(key, bad)]);
        let origin = format!("--{}: {bad:?} is not", key.replace('_', "-"));
        assert!(message.starts_with(&origin), "{message}");
    }
    assert!(refused(&[("learners", "2"), ("min_learners", "3")]).contains("learners is 2"));
    assert!(refused(&[("min_learners", "2")]).contains("learners is 1"));
}

#[test]
fn words_are_understood_in_any_case_or_corrected() {
    for (key, text, shown) in [("reducer", "adamW", "adamw"), ("consistency", "Async", "async")] {
        assert_eq!(setting(&blank(&[(key, text)]).unwrap(), key), shown);
    }
    let message = refused(&[("consistency", "quorum 2")]);
    assert!(message.starts_with("--consistency: \"quorum 2\" is not sync"), "{message}");
    assert!(message.contains("did you mean quorum(2)?"), "{message}");
}

#[test]
fn texts_must_be_text() {
    use std::os::unix::ffi::OsStringExt;
    let mut layer = flags(&[("mount", "/mnt"), ("size", "1MiB")]);
    layer.set("reducer", [OsString::from_vec(vec![0xff])]);
    assert!(UpConfig::merge(&[layer]).unwrap_err().message.contains("not valid UTF-8"));
    // Paths need not be.
    let mut layer = flags(&[("size", "1MiB")]);
    layer.set("mount", [OsString::from_vec(b"/mnt/\xff".to_vec())]);
    assert!(UpConfig::merge(&[layer]).is_ok());
}

#[test]
fn a_snapshot_is_of_one_model_and_not_blank() {
    let from = |pairs: &[(&'static str, &str)]| {
        let mut all = vec![("mount", "/mnt"), ("from", "/backup/llama")];
        all.extend_from_slice(pairs);
        UpConfig::merge(&[flags(&all)])
    };
    let models = from(&[("name", "llama")]).unwrap().models;
    let snapshot = |expected: Option<&str>| ModelSource::Snapshot {
        dir: "/backup/llama".into(),
        expected: expected.map(PathBuf::from),
    };
    assert_eq!(models, [ModelSpec { name: "llama".into(), source: snapshot(None) }]);
    let models = from(&[("models", "a.safetensors"), ("name", "b")]).unwrap().models;
    assert_eq!(models, [ModelSpec { name: "b".into(), source: snapshot(Some("a.safetensors")) }]);
    let blank = from(&[("size", "1MiB")]).unwrap_err();
    assert!(blank.message.contains("--from and --size exclude each other"), "{}", blank.message);
    let typed = from(&[("dtype", "bf16")]).unwrap_err();
    assert!(typed.message.contains("--dtype is of no use with --from"), "{}", typed.message);
    let several = from(&[("models", "a.safetensors,b.safetensors")]).unwrap_err();
    assert!(several.message.contains("a snapshot is of one model"), "{}", several.message);
}
