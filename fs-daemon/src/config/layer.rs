//! The sources of a configuration: each gives texts by key, and knows how to name where they are from.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, ValueHint};

use libmodelio::vocabulary::schedule::Schedule;
use ps_backend::snapshot::{MANIFEST, Shelf, Stored};
use ps_backend::stores::{absolute_url, is_url};
use tempfile::TempDir;

use super::torch_state;
use super::values::not_a_word;
use crate::error::Error;

/// The options that some commands share: each is `--some-key`, `GRADFS_SOME_KEY` and `some_key` in a file.
#[derive(Debug)]
pub struct Vocabulary {
    keys: BTreeMap<String, Arg>,
    help: &'static str,
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
    /// The directory of a snapshot that was made for this configuration.
    made: Option<Arc<TempDir>>,
}

#[derive(Clone, Debug)]
enum Source {
    Flags,
    Environment,
    File(PathBuf),
    /// A snapshot's manifest.
    Snapshot(PathBuf),
}

impl Layer {
    fn new(of: &'static Vocabulary, source: Source) -> Layer {
        Layer { of, source, values: BTreeMap::new(), made: None }
    }

    /// Gives `key` these values; with none, it stays unset.
    pub fn set<T: Into<OsString>>(&mut self, key: &'static str, values: impl IntoIterator<Item = T>) {
        debug_assert!(self.of.keys.contains_key(key), "{key} is no key");
        let values: Vec<OsString> = values.into_iter().map(Into::into).collect();
        if !values.is_empty() {
            self.values.insert(key, values);
        }
    }

    /// Takes the values of `key` away.
    pub fn take(&mut self, key: &str) -> Vec<OsString> {
        self.values.remove(key).unwrap_or_default()
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
            Source::Flags if self.of.keys.get(key).is_some_and(Arg::is_positional) => key.into(),
            Source::Flags => format!("--{}", key.replace('_', "-")),
            Source::Environment => format!("{PREFIX}{}", key.to_uppercase()),
            Source::File(path) | Source::Snapshot(path) => format!("{}: {key}", path.display()),
        }
    }
}

/// The strongest values of `key`, and the name of their origin.
pub fn strongest<'a>(layers: &'a [Layer], key: &str) -> Option<(String, &'a [OsString])> {
    layers.iter().find_map(|layer| layer.get(key).map(|values| (layer.origin(key), values)))
}

/// The options of `T`, each from the first of `layers` that has it. They are parsed as a command line, so a value means
/// the same wherever it is from. Every complaint names its origin.
pub fn merged<T: Args>(layers: &[Layer]) -> Result<T, Error> {
    let command = T::augment_args(Command::new("gradfs").no_binary_name(true));
    let (mut words, mut behind) = (Vec::new(), vec![OsString::from("--")]);
    for option in command.get_arguments() {
        let Some((origin, values)) = strongest(layers, option.get_id().as_str()) else { continue };
        if let Some(value) = values.iter().find(|value| !is_path(option) && value.to_str().is_none()) {
            return Err(Error::usage(format!("{origin}: {value:?} is not valid UTF-8")));
        }
        match option.get_long() {
            None => behind.extend_from_slice(values),
            Some(long) => words.extend(values.iter().map(|value| {
                let mut word = OsString::from(format!("--{long}="));
                word.push(value);
                word
            })),
        }
    }
    let matches = command.try_get_matches_from(words.into_iter().chain(behind));
    let parsed = matches.and_then(|matches| T::from_arg_matches(&matches));
    parsed.map_err(|error| explained(&error, layers).unwrap_or_else(|| Error::usage(error.to_string())))
}

/// A parser's complaint about a value, with the value's origin; none if it is about something else.
pub fn explained(error: &clap::Error, layers: &[Layer]) -> Option<Error> {
    // "--threads <N>", "--insecure[=<BOOL>]" or "<NAME>".
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let option = option.split([' ', '=']).next()?.trim_end_matches('[');
    let key = option.trim_start_matches('-').replace('-', "_");
    let origin = strongest(layers, &key).map_or_else(|| option.to_owned(), |(origin, _)| origin);
    let inner = std::error::Error::source(error).and_then(|inner| inner.downcast_ref::<Error>());
    let value = error.get(ContextKind::InvalidValue);
    Some(match (inner, value, error.get(ContextKind::ValidValue)) {
        (Some(inner), ..) => {
            let outer = Error::usage(format!("{origin}: {}", inner.message));
            Error { hint: inner.hint.clone(), ..outer }
        }
        (_, Some(ContextValue::String(value)), Some(ContextValue::Strings(words))) if !layers.is_empty() => {
            let Error { message, hint, .. } = not_a_word(value, words.iter());
            Error { hint, ..Error::usage(format!("{origin}: {message}")) }
        }
        _ => return None,
    })
}

/// The options that `T` declares.
pub fn options_of<T: Args>() -> Vec<Arg> {
    T::augment_args(Command::new("gradfs")).get_arguments().cloned().collect()
}

fn is_path(key: &Arg) -> bool {
    matches!(key.get_value_hint(), ValueHint::AnyPath | ValueHint::FilePath | ValueHint::DirPath)
}

fn takes_many(key: &Arg) -> bool {
    matches!(key.get_action(), ArgAction::Append)
}

impl Vocabulary {
    /// Holds those of `options` that have a value, except the one that names the file. `help` is the command
    /// that explains them.
    pub fn new(options: impl IntoIterator<Item = Arg>, help: &'static str) -> Vocabulary {
        let is_key = |option: &Arg| option.get_action().takes_values() && option.get_id() != "config";
        let keys = options.into_iter().filter(is_key).map(|key| (key.get_id().to_string(), key));
        Vocabulary { keys: keys.collect(), help }
    }

    /// All names of keys.
    #[cfg(test)]
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.keys.keys().map(String::as_str)
    }

    /// The key that needs the fewest edits to become `name`, at most `limit`. With more than a third of the
    /// letters changed, anything would resemble some key. For a short name, which only a flag has, it
    /// suggests the long one.
    fn nearest(&self, name: &str, limit: usize) -> Option<&str> {
        let plain = name.replace('-', "_").to_lowercase();
        let limit = limit.min(plain.chars().count() / 3);
        let edits = |name: &str, key: &Arg| match key.get_all_aliases() {
            Some(short) if short.contains(&plain.as_str()) => 0,
            _ => strsim::levenshtein(&plain, name),
        };
        let nearest = self.keys.iter().map(|(name, key)| (edits(name, key), name.as_str())).min();
        nearest.filter(|(edits, _)| *edits <= limit).map(|(_, name)| name)
    }

    /// A command line without options, to be filled with [`Layer::set`].
    pub fn flags(&'static self) -> Layer {
        Layer::new(self, Source::Flags)
    }

    /// The layer of the command line.
    fn given(&'static self, matches: &ArgMatches) -> Layer {
        let mut layer = self.flags();
        for (key, _) in matches.ids().filter_map(|id| self.keys.get_key_value(id.as_str())) {
            if matches.value_source(key) == Some(ValueSource::CommandLine) {
                layer.set(key, matches.get_raw(key).into_iter().flatten());
            }
        }
        layer
    }

    /// The sources of a configuration, the strongest first: the command line, the environment `variables`, the file that
    /// either of them names, and a snapshot.
    pub fn layers(
        &'static self,
        matches: &ArgMatches,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Vec<Layer>, Error> {
        let variables: Vec<_> = variables.into_iter().collect();
        let named = variables.iter().find(|(name, value)| name == CONFIG_VARIABLE && !value.is_empty());
        // Some commands take no configuration file.
        let given = matches.try_get_one("config").ok().flatten();
        let file = given.cloned().or(named.map(|(_, value)| PathBuf::from(value)));
        let mut layers = vec![self.given(matches), self.environment(variables)];
        if let Some(path) = file {
            layers.push(self.file(&path)?);
        }
        let named =
            |layers: &[Layer], key| layers.iter().find_map(|layer| layer.get(key)?.last().map(PathBuf::from));
        if let Some(state) = named(&layers, "state") {
            self.go_on_in(&state, &mut layers)?;
        }
        // A configuration file is of all commands.
        let takes_state = matches.try_contains_id("optimizer_state").is_ok();
        if let Some(state) = named(&layers, "optimizer_state").filter(|_| takes_state) {
            self.go_on_with(&state, &mut layers)?;
        }
        if let Some(dir) = named(&layers, "from") {
            layers.push(self.snapshot(&dir, &layers)?);
        }
        Ok(layers)
    }

    /// The variables `GRADFS_<KEY>` among `variables`; empty ones count as unset. `GRADFS_MODELS` is
    /// separated by colons, `GRADFS_NAME` by commas.
    pub fn environment(&'static self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Layer {
        let mut layer = Layer::new(self, Source::Environment);
        for (variable, value) in variables {
            let Some(name) = variable.to_str().and_then(|v| v.strip_prefix(PREFIX)) else { continue };
            let Some((key, option)) =
                self.keys.get_key_value(&name.to_lowercase()).filter(|_| name == name.to_uppercase())
            else {
                // Others may use the prefix, so this is no error; but a slip of the pen should show.
                if !matches!(name, "CONFIG" | "LOG" | "LOG_FILE" | "LOG_FORMAT" | "LEARNER")
                    && !name.starts_with("ETCD_")
                    && let Some(meant) = self.nearest(name, 2)
                {
                    let meant = meant.to_uppercase();
                    tracing::warn!("{PREFIX}{name} means nothing to gradfs: did you mean {PREFIX}{meant}?");
                }
                continue;
            };
            let values = match value.to_str() {
                _ if value.is_empty() => continue,
                _ if takes_many(option) && is_path(option) => {
                    std::env::split_paths(&value).map(PathBuf::into_os_string).collect()
                }
                Some(text) if takes_many(option) => text.split(',').map(|name| name.trim().into()).collect(),
                _ => vec![value],
            };
            layer.values.insert(key, values);
        }
        layer
    }

    /// The job keeps its snapshots in `state`. If there is one, it goes on from that, in place of a blank model.
    fn go_on_in(&'static self, state: &Path, layers: &mut [Layer]) -> Result<(), Error> {
        if let Some((origin, _)) = ["from", "snapshot_to"].into_iter().find_map(|key| strongest(layers, key))
        {
            return Err(Error::usage(format!("{origin} and state exclude each other"))
                .hint("a job with --state goes on from its own snapshots, and keeps them there"));
        }
        let url = absolute_url(&state.to_string_lossy());
        let keys =
            ["from", "snapshot_to"].map(|key| self.keys.get_key_value(key).map(|(key, _)| key.as_str()));
        let [Some(from), Some(snapshot_to)] = keys else { return Ok(()) };
        if Shelf::open(&url)
            .and_then(|shelf| shelf.names())
            .map_err(|error| Error::new(error.to_string()))?
            .is_empty()
        {
            layers[0].set(snapshot_to, [url]);
            return Ok(());
        }
        Stored::open(Path::new(&url), None)
            .map_err(|error| Error::from(error).of_own_store(&state.display().to_string()))?;
        layers
            .iter_mut()
            .for_each(|layer| ["size", "dtype"].into_iter().for_each(|key| drop(layer.take(key))));
        layers[0].set(from, [url.clone()]);
        layers[0].set(snapshot_to, [url]);
        Ok(())
    }

    /// A model begins with the optimizer's state in a file of torch: it goes on from a snapshot of the two.
    fn go_on_with(&'static self, state: &Path, layers: &mut [Layer]) -> Result<(), Error> {
        let (origin, _) = strongest(layers, "optimizer_state").unwrap_or_default();
        if let Some((other, _)) = ["from", "size"].into_iter().find_map(|key| strongest(layers, key)) {
            return Err(Error::usage(format!("{origin} and {other} exclude each other"))
                .hint("the state is that of the weights of --model"));
        }
        let path = |key| strongest(layers, key).and_then(|(_, values)| values.last().map(PathBuf::from));
        let needs = || Error::usage(format!("{origin} needs --model")).hint("name the file of the weights");
        let (model, names) = (path("model").ok_or_else(needs)?, path("optimizer_names"));
        let reducer = path("reducer");
        let reducer = reducer.as_deref().and_then(Path::to_str);
        let made = torch_state::snapshot_of(&model, state, names.as_deref(), reducer)?;
        if let Some((from, _)) = self.keys.get_key_value("from") {
            layers[0].set(from, [made.path().join("snapshot")]);
        }
        layers[0].made = Some(Arc::new(made));
        Ok(())
    }

    /// The settings from the snapshot in `dir`, which a job that goes on from it has by default. A schedule that is given in
    /// the `stronger` layers and is not the snapshot's begins at the snapshot's version.
    ///
    /// # Errors
    /// A directory that is no snapshot.
    fn snapshot(&'static self, dir: &Path, stronger: &[Layer]) -> Result<Layer, Error> {
        let reader = Stored::open(dir, None)?;
        let head = reader.head();
        let of = if matches!(reader, Stored::Packed(..)) { dir.to_owned() } else { dir.join(MANIFEST) };
        let mut layer = Layer::new(self, Source::Snapshot(of));
        let settings = head.settings.iter().map(|(key, value)| (key.as_str(), value.clone()));
        let of_model = [("name", head.model.clone()), ("block_size", head.block_size.to_string())];
        // Another model than that of the store does not save there.
        let named = stronger.iter().find_map(|layer| layer.get("name")?.last()?.to_str());
        let store = reader.store().map(|shelf| absolute_url(shelf.url()));
        let goes_on = named.is_none_or(|name| name == head.model);
        for (name, value) in settings.chain(of_model) {
            if name == "snapshot_to" && !(goes_on && store.as_ref() == Some(&absolute_url(&value))) {
                continue;
            }
            let Some((key, option)) = self.keys.get_key_value(name) else { continue };
            match takes_many(option) {
                true => layer.set(key, value.lines()),
                false => layer.set(key, [value]),
            }
        }
        let parsed = |text: &str| text.trim().to_ascii_lowercase().parse::<Schedule>().unwrap_or_default();
        let before = head.settings.get("schedule").map_or(Schedule::Constant, |text| parsed(text));
        let given = stronger.iter().find_map(|layer| layer.get("schedule")?.last()?.to_str());
        if given.is_some_and(|text| parsed(text) != before)
            && let Some((key, _)) = self.keys.get_key_value("schedule_start")
        {
            layer.set(key, [head.record.version.to_string()]);
        }
        Ok(layer)
    }

    /// The configuration file at `path`.
    fn file(&'static self, path: &Path) -> Result<Layer, Error> {
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
            let Some((key, option)) = self.keys.get_key_value(&name) else {
                let help = self.help;
                let hint = match self.nearest(&name, 4) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => format!("{help} lists the options: --some-option is some_option in the file"),
                };
                return Err(Error::usage(format!("{shown}: unknown key {name}")).hint(hint));
            };
            let many = takes_many(option);
            let values = match value {
                toml::Value::Array(values) if many => values.into_iter().map(scalar).collect(),
                value => scalar(value).map(|value| vec![value]),
            };
            let Some(mut values) = values else {
                let wanted = if many { "a text or a list of texts" } else { "a single value" };
                return Err(Error::usage(format!("{shown}: {name} must be {wanted}")));
            };
            if is_path(option) {
                let base = path.parent().unwrap_or(Path::new(""));
                let is_path = |value: &&mut OsString| value.to_str().is_none_or(|text| !is_url(text));
                values.iter_mut().filter(is_path).for_each(|value| *value = base.join(&value).into());
            }
            layer.set(key, values);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::UP;

    #[test]
    fn a_typing_error_gets_a_suggestion() {
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
