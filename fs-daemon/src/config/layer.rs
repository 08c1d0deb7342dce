//! The sources of a configuration: each gives texts by key, and knows how to name where they are from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A thing that can be configured: `--some-key`, `GRADFS_SOME_KEY` and `some_key` in a file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name, in snake case.
    pub name: &'static str,
    /// What its value looks like.
    pub kind: Kind,
    /// Whether it is a job setting, with a `control/` file of the same name.
    pub setting: bool,
}

/// What a value looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// A host, with or without a port.
    Address,
    /// One path.
    Path,
    /// Any number of paths.
    Paths,
    /// One name.
    Name,
    /// Any number of names.
    Names,
    /// Bytes, with or without a unit.
    Size,
    /// True or false.
    Switch,
    /// A whole number, at least this.
    Whole(u64),
    /// A finite number.
    Number,
    /// A finite number of seconds, not negative.
    Seconds,
    /// One of these words.
    Word(&'static [&'static str]),
    /// One of [`CONSISTENCIES`], with numbers for the letters.
    Consistency,
}

/// Element types of a blank model.
pub const DTYPES: &[&str] = &["f32", "f64", "f16", "bf16"];
/// Other names that people know for [`DTYPES`].
pub const DTYPE_ALIASES: &[(&str, &[&str])] = &[
    ("f32", &["float32", "fp32", "float"]),
    ("f64", &["float64", "fp64", "double"]),
    ("f16", &["float16", "fp16", "half"]),
    ("bf16", &["bfloat16"]),
];
/// Short names of keys, as torch has them. They are flags; elsewhere the key is named to who writes one.
pub const KEY_ALIASES: &[(&str, &str)] = &[("lr", "learning_rate"), ("wd", "weight_decay")];
/// What a shard can do with contributions.
pub const REDUCERS: &[&str] = &["sum", "sgd", "momentum", "nesterov", "adam", "adamw", "assign"];
/// Which contributions a version waits for.
pub const CONSISTENCIES: &[&str] = &["sync", "async", "quorum(K)", "ssp(S)"];
/// Whether something is done.
pub const TRUTHS: &[&str] = &["true", "false"];
/// What an optimizer sees of several contributions.
pub const AGGREGATIONS: &[&str] = &["mean", "sum"];
/// What becomes of NaN and Inf.
pub const NONFINITES: &[&str] = &["reject", "accept"];

/// Every key of `gradfs up`.
pub const KEYS: &[Key] = &[
    key("models", Kind::Paths),
    key("mount", Kind::Path),
    key("name", Kind::Names),
    key("size", Kind::Size),
    key("dtype", Kind::Word(DTYPES)),
    key("block_size", Kind::Size),
    key("threads", Kind::Whole(1)),
    key("allow_other", Kind::Switch),
    key("uid", Kind::Name),
    key("gid", Kind::Name),
    key("umask", Kind::Name),
    key("no_passthrough", Kind::Switch),
    key("metrics", Kind::Address),
    setting("reducer", Kind::Word(REDUCERS)),
    setting("consistency", Kind::Consistency),
    setting("deterministic", Kind::Word(TRUTHS)),
    setting("learners", Kind::Whole(1)),
    setting("min_learners", Kind::Whole(1)),
    setting("lease", Kind::Seconds),
    setting("linger", Kind::Seconds),
    setting("timeout", Kind::Seconds),
    setting("retain", Kind::Whole(0)),
    setting("max_versions", Kind::Whole(1)),
    setting("learning_rate", Kind::Number),
    setting("momentum", Kind::Number),
    setting("dampening", Kind::Number),
    setting("beta1", Kind::Number),
    setting("beta2", Kind::Number),
    setting("epsilon", Kind::Number),
    setting("weight_decay", Kind::Number),
    setting("carry", Kind::Number),
    setting("aggregation", Kind::Word(AGGREGATIONS)),
    setting("nonfinite", Kind::Word(NONFINITES)),
    setting("frozen", Kind::Names),
];

pub(super) const fn key(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, setting: false }
}

const fn setting(name: &'static str, kind: Kind) -> Key {
    Key { name, kind, setting: true }
}

/// The keys that some commands have in common.
#[derive(Debug)]
pub struct Vocabulary {
    /// Of keys of one name the first counts.
    pub keys: &'static [&'static [Key]],
    /// The command that tells what they are.
    pub help: &'static str,
}

/// Of `gradfs up`.
pub static UP: Vocabulary = Vocabulary { keys: &[KEYS], help: "gradfs up --help" };

impl Vocabulary {
    fn known(&self, name: &str) -> Option<&'static Key> {
        self.keys.iter().copied().flatten().find(|key| key.name == name)
    }

    /// The key that needs the fewest edits to become `name`, at most `limit`. With more than a third of the
    /// letters changed, anything would resemble some key.
    fn nearest(&self, name: &str, limit: usize) -> Option<&'static str> {
        let plain = name.replace('-', "_").to_lowercase();
        if let Some((_, key)) = KEY_ALIASES.iter().find(|(short, _)| *short == plain) {
            return Some(key);
        }
        let limit = limit.min(plain.chars().count() / 3);
        let keys = self.keys.iter().copied().flatten();
        keys.map(|key| (edits(&plain, key.name), key.name))
            .min()
            .filter(|(edits, _)| *edits <= limit)
            .map(|(_, name)| name)
    }
}

/// Prefix of environment variables that set keys.
const PREFIX: &str = "GRADFS_";
/// Names the configuration file.
pub const CONFIG_VARIABLE: &str = "GRADFS_CONFIG";

/// One source of values.
#[derive(Clone, Debug)]
pub struct Layer {
    of: &'static Vocabulary,
    source: Source,
    values: BTreeMap<&'static str, Vec<OsString>>,
}

#[derive(Clone, Debug)]
enum Source {
    Flags,
    Environment,
    File(PathBuf),
}

impl Layer {
    fn new(of: &'static Vocabulary, source: Source) -> Layer {
        Layer { of, source, values: BTreeMap::new() }
    }

    /// Gives `key` these values; with none, it stays unset.
    pub fn set<T: Into<OsString>>(&mut self, key: &'static str, values: impl IntoIterator<Item = T>) {
        debug_assert!(self.of.known(key).is_some(), "{key} is no key");
        let values: Vec<OsString> = values.into_iter().map(Into::into).collect();
        if !values.is_empty() {
            self.values.insert(key, values);
        }
    }

    /// The command that tells what can be given.
    pub fn help(&self) -> &'static str {
        self.of.help
    }

    /// The values of `key`.
    pub fn get(&self, key: &str) -> Option<&[OsString]> {
        self.values.get(key).map(Vec::as_slice)
    }

    /// How a user would call the place where `key` was given.
    pub fn origin(&self, key: &str) -> String {
        match &self.source {
            Source::Flags if matches!(key, "models" | "mount") => key.into(),
            Source::Flags => format!("--{}", key.replace('_', "-")),
            Source::Environment => format!("{PREFIX}{}", key.to_uppercase()),
            Source::File(path) => format!("{}: {key}", path.display()),
        }
    }
}

impl Vocabulary {
    /// The command line, to be filled with [`Layer::set`].
    pub fn flags(&'static self) -> Layer {
        Layer::new(self, Source::Flags)
    }

    /// The variables `GRADFS_<KEY>` among `variables`; empty ones count as unset. `GRADFS_MODELS` is
    /// separated by colons, `GRADFS_NAME` by commas.
    pub fn environment(&'static self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Layer {
        let mut layer = Layer::new(self, Source::Environment);
        for (variable, value) in variables {
            let Some(name) = variable.to_str().and_then(|v| v.strip_prefix(PREFIX)) else { continue };
            let Some(key) = self.known(&name.to_lowercase()).filter(|_| name == name.to_uppercase()) else {
                // Others may use the prefix, so this is no error; but a slip of the pen should show.
                if !matches!(name, "CONFIG" | "LOG" | "LOG_FILE" | "LOG_FORMAT")
                    && let Some(meant) = self.nearest(&name.to_lowercase(), 2)
                {
                    let meant = meant.to_uppercase();
                    tracing::warn!("{PREFIX}{name} means nothing to gradfs: did you mean {PREFIX}{meant}?");
                }
                continue;
            };
            let values = match key.kind {
                _ if value.is_empty() => continue,
                Kind::Paths => std::env::split_paths(&value).map(PathBuf::into_os_string).collect(),
                Kind::Names => match value.to_str() {
                    Some(text) => text.split(',').map(|name| name.trim().into()).collect(),
                    None => vec![value],
                },
                _ => vec![value],
            };
            layer.values.insert(key.name, values);
        }
        layer
    }

    /// The configuration file at `path`.
    pub fn file(&'static self, path: &Path) -> Result<Layer, Error> {
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::usage(format!("cannot read the configuration {}", path.display()))
                .caused_by(e)
                .hint(format!("--config and {CONFIG_VARIABLE} name a TOML file"))
        })?;
        self.parse(path, &text)
    }

    /// The configuration `text`, read from `path`. Relative paths in it start from its directory.
    pub fn parse(&'static self, path: &Path, text: &str) -> Result<Layer, Error> {
        let shown = path.display();
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| {
            Error::usage(format!("{shown} is not valid TOML"))
                .caused_by(e.to_string().trim_end().to_owned())
                .hint("write one setting a line: key = value, with texts in double quotes")
        })?;
        let mut layer = Layer::new(self, Source::File(path.to_owned()));
        for (name, value) in table {
            let Some(key) = self.known(&name) else {
                let hint = match self.nearest(&name, 4) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => {
                        let help = self.help;
                        format!("{help} lists the options: --some-option is some_option in the file")
                    }
                };
                return Err(Error::usage(format!("{shown}: unknown key {name}")).hint(hint));
            };
            let many = matches!(key.kind, Kind::Paths | Kind::Names);
            let values = match value {
                toml::Value::Array(values) if many => values.into_iter().map(scalar).collect(),
                value => scalar(value).map(|value| vec![value]),
            };
            let Some(mut values) = values else {
                let wanted = if many { "a text or a list of texts" } else { "a single value" };
                return Err(Error::usage(format!("{shown}: {name} must be {wanted}")));
            };
            if matches!(key.kind, Kind::Path | Kind::Paths) {
                let base = path.parent().unwrap_or(Path::new(""));
                values.iter_mut().for_each(|value| *value = base.join(&value).into());
            }
            layer.set(key.name, values);
        }
        Ok(layer)
    }
}

/// A TOML value as the text one would have given as a flag.
fn scalar(value: toml::Value) -> Option<OsString> {
    Some(match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.to_string().into(),
        toml::Value::Float(number) => number.to_string().into(),
        toml::Value::Boolean(yes) => yes.to_string().into(),
        toml::Value::Datetime(_) | toml::Value::Array(_) | toml::Value::Table(_) => return None,
    })
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let swapped = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = swapped.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("same", "same"), 0);
        assert_eq!(UP.nearest("block-size", 0), Some("block_size"));
        assert_eq!(UP.nearest("lerning_rate", 2), Some("learning_rate"));
        assert_eq!(UP.nearest("zzzzzzzzzz", 2), None);
    }

    #[test]
    fn unknown_toml_keys_are_named_with_the_nearest() {
        let error = UP.parse(Path::new("job.toml"), "lerning_rate = 0.1").unwrap_err();
        assert_eq!(error.message, "job.toml: unknown key lerning_rate");
        assert_eq!(error.hint.as_deref(), Some("did you mean learning_rate?"));
        assert_eq!(error.exit_code(), 2);
        // Sections are keys too.
        assert!(UP.parse(Path::new("job.toml"), "[reduce]\nx = 1").is_err());
    }

    #[test]
    fn unknown_toml_keys_that_resemble_none_get_no_guess() {
        let hint = |key: &str| {
            let error = UP.parse(Path::new("job.toml"), &format!("{key} = 1")).unwrap_err();
            assert_eq!(error.message, format!("job.toml: unknown key {key}"));
            error.hint.unwrap()
        };
        for far in ["foo", "x", "time", "port", "checkpoint", "completely_different_thing"] {
            assert!(hint(far).contains("gradfs up --help"), "{far}: {}", hint(far));
        }
        for (near, key) in [
            ("siz", "size"),
            ("lr", "learning_rate"),
            ("WD", "weight_decay"),
            ("mout", "mount"),
            ("Threads", "threads"),
            ("weightdecay", "weight_decay"),
            ("learning-speed", "learning_rate"),
            ("max_version", "max_versions"),
        ] {
            assert_eq!(hint(near), format!("did you mean {key}?"));
        }
    }

    #[test]
    fn toml_values_are_the_texts_of_flags() {
        let text = "models = ['a.safetensors', '/m/b.safetensors']\nname = 'x'\nsize = 65_536\n\
                    learning_rate = 1e-3\nallow_other = true\nmount = 'mnt'";
        let layer = UP.parse(Path::new("/etc/job.toml"), text).unwrap();
        assert_eq!(layer.get("models").unwrap(), ["/etc/a.safetensors", "/m/b.safetensors"]);
        assert_eq!(layer.get("mount").unwrap(), ["/etc/mnt"]);
        assert_eq!(layer.get("name").unwrap(), ["x"]);
        assert_eq!(layer.get("size").unwrap(), ["65536"]);
        assert_eq!(layer.get("learning_rate").unwrap(), ["0.001"]);
        assert_eq!(layer.get("allow_other").unwrap(), ["true"]);
        assert_eq!(layer.get("threads"), None);
        assert_eq!(layer.origin("size"), "/etc/job.toml: size");
    }

    #[test]
    fn toml_of_the_wrong_shape_is_refused() {
        for text in ["learners = [1]", "name = [1979-05-27]", "lease = {a = 1}", "size = ", "size 1"] {
            let error = UP.parse(Path::new("job.toml"), text).unwrap_err();
            assert!(error.message.starts_with("job.toml"), "{text}: {}", error.message);
        }
        assert!(UP.file(Path::new("/nonexistent/job.toml")).is_err());
    }

    #[test]
    fn environment_is_read_by_prefix() {
        let layer = UP.environment(
            [
                ("GRADFS_LEARNING_RATE", "0.5"),
                ("GRADFS_NAME", "a, b"),
                ("GRADFS_MODELS", "/x:/y"),
                ("GRADFS_THREADS", ""),
                ("GRADFS_LOG", "debug"),
                ("GRADFS_learners", "3"),
                ("HOME", "/root"),
            ]
            .map(|(k, v)| (k.into(), v.into())),
        );
        assert_eq!(layer.get("learning_rate").unwrap(), ["0.5"]);
        assert_eq!(layer.get("name").unwrap(), ["a", "b"]);
        assert_eq!(layer.get("models").unwrap(), ["/x", "/y"]);
        assert_eq!(layer.values.len(), 3);
        assert_eq!(layer.origin("learning_rate"), "GRADFS_LEARNING_RATE");
    }
}
