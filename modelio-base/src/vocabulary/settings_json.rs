//! All settings of a job together, as JSON: what `settings.json` shows, and takes as one change.

use serde_json::{Map, Value};

use super::controls::{ControlError, Controls, MAX_TEXT, MOST_QUOTED, SETTINGS};

/// The name of all settings together.
pub const SETTINGS_JSON: &str = "settings.json";

/// The longest text of `settings.json`, in bytes. It holds two long settings, whose line ends take two letters, and all
/// others.
pub const MAX_JSON: usize = 4 * MAX_TEXT;

/// The longest text of a setting, in bytes.
pub fn longest(name: &str) -> usize {
    if name == SETTINGS_JSON { MAX_JSON } else { MAX_TEXT }
}

/// All settings by name, as texts.
pub fn all_of(controls: &Controls) -> Map<String, Value> {
    let text = |(name, _): &(&str, _)| Some(((*name).to_owned(), Value::String(controls.get(name)?)));
    SETTINGS.iter().filter_map(text).collect()
}

/// [`Controls::get`], also of [`SETTINGS_JSON`].
pub fn get(controls: &Controls, name: &str) -> Option<String> {
    if name != SETTINGS_JSON {
        return controls.get(name);
    }
    Some(format!("{:#}", Value::Object(all_of(controls))))
}

/// [`Controls::with`], also of [`SETTINGS_JSON`], whose value is an object with the settings to change: all of them are set,
/// or none. A setting is a text, a number, true or false, or a list of lines. Of a name that comes twice, the last counts.
///
/// # Errors
/// The text is no such object, or [`Controls::with_all`] refuses its settings.
pub fn with(controls: &Controls, name: &str, value: &str) -> Result<Controls, ControlError> {
    if name != SETTINGS_JSON {
        return controls.with(name, value);
    }
    let object: Map<String, Value> = serde_json::from_str(value).map_err(|error| ControlError::Invalid {
        name: SETTINGS_JSON,
        value: value.trim().chars().take(MOST_QUOTED).collect(),
        expected: format!("a JSON object like {{\"learning_rate\": 0.1}}: {error}"),
    })?;
    let mut settings = Vec::new();
    for (name, value) in object {
        let Some(text) = text_of(&value) else {
            let what = format!("{name} has to be a text, a number, true or false, or a list of lines");
            return Err(ControlError::Conflict(what));
        };
        settings.push((name, text));
    }
    controls.with_all(settings.iter().map(|(name, text)| (name.as_str(), text.as_str())))
}

fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(is) => Some(is.to_string()),
        Value::Array(lines) => {
            let lines: Option<Vec<_>> = lines.iter().map(Value::as_str).collect();
            Some(lines?.join("\n"))
        }
        Value::Null | Value::Object(_) => None,
    }
}

/// Whether more may make this a JSON text: it is a beginning of one.
pub fn is_incomplete(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_err_and(|error| error.is_eof())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_in_one_object_are_set_together_or_not_at_all() {
        let before = Controls::default();
        let text = r#"{"min_learners": 3, "learners": "4", "reducer": "adamw", "frozen": ["a.*", "b"],
                       "deterministic": true, "learning_rate": 1e-3}"#;
        let now = with(&before, SETTINGS_JSON, text).unwrap();
        let now_has = |name| now.get(name).unwrap();
        assert_eq!([now_has("min_learners"), now_has("learners"), now_has("reducer")], ["3", "4", "adamw"]);
        assert_eq!(
            [now_has("frozen"), now_has("deterministic"), now_has("learning_rate")],
            ["a.*\nb", "true", "0.001"]
        );
        let shown = get(&now, SETTINGS_JSON).unwrap();
        assert_eq!(with(&before, SETTINGS_JSON, &shown).unwrap(), now, "what is shown can be written");
        for (wrong, why) in [
            ("", "EOF"),
            ("[]", "JSON object"),
            (r#"{"learning_rate": null}"#, "learning_rate has to be a text"),
            (r#"{"learning_rate": "fast"}"#, "fast"),
            (r#"{"learning_rat": 1}"#, "learning_rat"),
            (r#"{"momentum": 0.5, "min_learners": 9}"#, "min_learners"),
        ] {
            let error = with(&before, SETTINGS_JSON, wrong).unwrap_err().to_string();
            assert!(error.contains(why), "{wrong}: {error}");
        }
        // Both long settings at their longest.
        let lines: Vec<_> = (0..MAX_TEXT / 20).map(|i| format!("layer.{i:06}.weight")).collect();
        let long = Controls::default().with("frozen", &lines.join("\n")).unwrap();
        let rules: Vec<_> = lines[..MAX_TEXT / 28].iter().map(|line| format!("{line} frozen")).collect();
        let long = long.with("tensors", &rules.join("\n")).unwrap();
        let shown = get(&long, SETTINGS_JSON).unwrap();
        assert!((2 * MAX_TEXT..longest(SETTINGS_JSON)).contains(&shown.len()), "{}", shown.len());
        assert_eq!(with(&before, SETTINGS_JSON, &shown).unwrap(), long);
        assert!(
            is_incomplete("{\"a\":\n") && is_incomplete("") && !is_incomplete("{} x") && !is_incomplete("{}")
        );
    }
}
