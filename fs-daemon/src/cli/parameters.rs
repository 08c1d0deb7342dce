//! The options of hyper-parameters, made from their table.

use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};
use libmodelio::vocabulary::reducer::{PARAMETERS, Parameter};

/// Short names, as torch has them.
const SHORT: [(&str, &str); 2] = [("lr", "learning_rate"), ("wd", "weight_decay")];

/// An option for each of [`PARAMETERS`]. Their values are taken from what was typed, as are those of all options.
#[derive(Debug)]
pub(super) struct ParameterArgs;

impl FromArgMatches for ParameterArgs {
    fn from_arg_matches(_: &ArgMatches) -> Result<ParameterArgs, Error> {
        Ok(ParameterArgs)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), Error> {
        Ok(())
    }
}

impl Args for ParameterArgs {
    fn augment_args(command: Command) -> Command {
        command.args(PARAMETERS.iter().map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        ParameterArgs::augment_args(command)
    }
}

fn option(of: &Parameter) -> Arg {
    let (first, rest) = of.meaning.split_at(1);
    let meaning = first.to_uppercase() + rest;
    let short = SHORT.iter().filter(|(_, name)| *name == of.name).map(|(short, _)| *short);
    Arg::new(of.name)
        // clap borrows names for as long as the program runs.
        .long(&*of.name.replace('_', "-").leak())
        .visible_aliases(short.collect::<Vec<_>>())
        .value_name("X")
        .allow_negative_numbers(true)
        .help(format!("{meaning} ({}) [default: {}]", of.readers(), of.defaults()))
}
