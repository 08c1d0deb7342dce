//! The input of the command line: a command's arguments, and the texts of its options, which the environment
//! and a file may also give.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::PathBuf;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::config::{CONFIG_VARIABLE, Layer, Vocabulary};
use crate::error::Error;

/// The variables of an environment.
pub trait Variables: IntoIterator<Item = (OsString, OsString)> {}

impl<T: IntoIterator<Item = (OsString, OsString)>> Variables for T {}

/// A command's arguments, as `T` declares them, and their texts.
#[derive(Debug)]
pub struct Given<T> {
    arguments: Box<T>,
    matches: Box<ArgMatches>,
}

impl<T> Deref for Given<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.arguments
    }
}

impl<T: FromArgMatches> FromArgMatches for Given<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Given<T>, clap::Error> {
        Ok(Given { arguments: T::from_arg_matches(matches)?.into(), matches: Box::new(matches.clone()) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Given::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Args> Args for Given<T> {
    fn augment_args(command: Command) -> Command {
        T::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

impl<T> Given<T> {
    /// The sources of a configuration, the strongest first: the command line, the environment `variables`, and the
    /// file that either of them names.
    pub fn layers(
        &self,
        vocabulary: &'static Vocabulary,
        variables: impl Variables,
    ) -> Result<Vec<Layer>, Error> {
        let variables: Vec<_> = variables.into_iter().collect();
        let named = variables.iter().find(|(name, value)| name == CONFIG_VARIABLE && !value.is_empty());
        let file = self.matches.get_one("config").cloned().or(named.map(|(_, value)| PathBuf::from(value)));
        let mut layers = vec![vocabulary.given(&self.matches), vocabulary.environment(variables)];
        if let Some(path) = file {
            layers.push(vocabulary.file(&path)?);
        }
        let from = layers.iter().find_map(|layer| layer.get("from")?.last().map(PathBuf::from));
        if let Some(dir) = from {
            layers.push(vocabulary.snapshot(&dir, &layers)?);
        }
        Ok(layers)
    }
}
