//! The header that is checked in says what the library has. With `UPDATE=1` it is written anew.

use std::path::Path;

#[test]
fn the_header_and_the_version_script_are_those_of_the_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let builder = cbindgen::Builder::new().with_config(config).with_src(here.join("src/lib.rs"));
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    // That heading is Rust's custom.
    let header = String::from_utf8(header).unwrap().replace(" # Safety\n", "");
    let is_name = |word: &&str| word.starts_with("modelio_") && header.contains(&format!("{word}("));
    let words = header.split(|c: char| !c.is_alphanumeric() && c != '_').filter(is_name);
    let mut names: Vec<&str> = words.collect();
    names.sort_unstable();
    names.dedup();
    let names: String = names.iter().map(|name| format!("        {name};\n")).collect();
    let script = format!("MODELIO_0 {{\n    global:\n{names}    local:\n        *;\n}};\n");
    for (file, text) in [("include/modelio.h", header.clone()), ("modelio.map", script)] {
        let file = here.join(file);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let known = std::fs::read_to_string(&file).unwrap_or_default();
        assert_eq!(known, text, "{} is old: run UPDATE=1 cargo test -p modelio-c", file.display());
    }
}
