//! The rules, held against the product. The lists below say where it does not keep them, and why.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::path::Path;

use structure::sources::Crate;
use structure::{calls, circles, fields, impls};

const ROOTS: [&str; 6] = [
    "modelio-base/src/lib.rs",
    "gradfs-rdma/src/lib.rs",
    "gradfs-stores/src/lib.rs",
    "libmodelio/src/lib.rs",
    "ps-backend/src/lib.rs",
    "fs-daemon/src/main.rs",
];
const MOST_FIELDS: usize = 15;

/// Structs with more fields, and how many they have. Settings and messages may grow.
const OF_MANY_FIELDS: [(&str, &str, usize, Why); 6] = [
    ("Controls", "modelio-base/src/vocabulary/controls.rs", 28, Why::Settings),
    ("RdmaOptions", "gradfs-rdma/src/options.rs", 18, Why::Settings),
    ("JobArgs", "fs-daemon/src/config/job.rs", 33, Why::Settings),
    ("RdmaArgs", "fs-daemon/src/config/rdma.rs", 17, Why::Settings),
    ("ShardConfig", "fs-daemon/src/config/cluster.rs", 16, Why::Settings),
    ("JobState", "libmodelio/src/wire/message.rs", 24, Why::Message),
];

/// Types with methods in files that are neither theirs nor private children of theirs, and in how many. First the
/// crate.
const METHODS_ELSEWHERE: [(&str, &str, usize, Why); 9] = [
    ("modelio-base", "Handle", 2, Why::OnePart),
    ("modelio-base", "Backend", 1, Why::OnePart),
    ("gradfs-rdma", "CmChannel", 1, Why::OnePart),
    ("gradfs-rdma", "Registration", 1, Why::OnePart),
    ("gradfs-rdma", "VerbsError", 1, Why::OnePart),
    ("libmodelio", "Message", 1, Why::Message),
    ("libmodelio", "ModelRecord", 1, Why::Message),
    ("libmodelio", "Refusal", 1, Why::Message),
    ("modelio-base", "Step", 1, Why::SameName),
];

/// Types whose files call each other's methods in circles, and the files of each circle. First the crate. The
/// numbers may only fall.
const CALLS_IN_CIRCLES: [(&str, &str, &[usize], Why); 2] =
    [("libmodelio", "Contributor", &[5], Why::Recursion), ("libmodelio", "Shared", &[5, 4], Why::Recursion)];

/// Why a rule is not kept.
#[derive(Clone, Copy, Debug)]
enum Why {
    /// People set these, each by its own name.
    Settings,
    /// It is as the wire has it; how it is written there stands beside.
    Message,
    /// One part of it needs a device, or `unsafe`, and has a file for that.
    OnePart,
    /// What is done here brings more of the same: an action brings blocks to push, a lost connection another one, an
    /// abandoned contribution the next.
    Recursion,
    /// The methods are of another type of that name, which a macro defines.
    SameName,
}

type Crates = [(&'static str, Crate); 6];

/// One test of all rules: it takes seconds to read the sources.
#[test]
fn the_product_keeps_the_rules_of_its_structure() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("a workspace");
    let crates = ROOTS.map(|root| (root, Crate::read(repository, root).expect("sources")));
    no_struct_has_more_than_fifteen_fields(&crates);
    methods_stand_with_their_type(&crates);
    no_files_import_each_other_in_a_circle(&crates);
    no_files_of_a_type_call_each_other_in_a_circle(&crates);
}

fn no_struct_has_more_than_fifteen_fields(crates: &Crates) {
    let listed =
        |&(name, file, fields, _): &(&str, &str, usize, Why)| ((name.to_owned(), file.to_owned()), fields);
    let listed: BTreeMap<_, _> = OF_MANY_FIELDS.iter().map(listed).collect();
    let many =
        crates.iter().flat_map(|(_, of)| fields::counts(of)).filter(|count| count.fields > MOST_FIELDS);
    let found: BTreeMap<_, _> = many.map(|count| ((count.name, count.file), count.fields)).collect();
    same(&found, &listed, "fields");
}

fn methods_stand_with_their_type(crates: &Crates) {
    let listed: BTreeMap<_, _> =
        METHODS_ELSEWHERE.iter().map(|&(of, name, files, _)| ((of, name.to_owned()), files)).collect();
    let of_crate = |(root, of): &(&'static str, Crate)| {
        let of_crate = crate_of(root);
        impls::elsewhere(of)
            .into_iter()
            .map(move |(name, files)| ((of_crate, name), files.len()))
            .collect::<Vec<_>>()
    };
    let found: BTreeMap<_, _> = crates.iter().flat_map(of_crate).collect();
    same(&found, &listed, "files with methods elsewhere");
}

fn crate_of(root: &'static str) -> &'static str {
    root.split('/').next().expect("the folder of a crate")
}

fn no_files_import_each_other_in_a_circle(crates: &Crates) {
    for (root, of) in crates {
        let arrows = circles::arrows(of);
        let files: BTreeSet<_> = of.modules.iter().map(|module| &module.file).collect();
        // A crate of few files may have one tree of them.
        assert!(
            files.len() < 10 || 2 * arrows.len() > files.len(),
            "{root}: hardly any file imports another"
        );
        assert_eq!(circles::circles(&arrows), [], "{root}");
    }
}

fn no_files_of_a_type_call_each_other_in_a_circle(crates: &Crates) {
    let listed: BTreeMap<_, _> = CALLS_IN_CIRCLES
        .iter()
        .map(|&(of, name, files, _)| ((of, name.to_owned()), files.to_vec()))
        .collect();
    let sizes = |circles: Vec<BTreeSet<String>>| circles.iter().map(BTreeSet::len).collect::<Vec<_>>();
    let of_crate = |(root, of): &(&'static str, Crate)| {
        let of_type = |(name, circles)| ((crate_of(root), name), sizes(circles));
        calls::in_circles(of).into_iter().map(of_type).collect::<Vec<_>>()
    };
    let found: BTreeMap<_, _> = crates.iter().flat_map(of_crate).collect();
    same(&found, &listed, "files whose methods call each other in circles");
}

fn same<K: Ord + Debug, V: PartialEq + Debug>(found: &BTreeMap<K, V>, listed: &BTreeMap<K, V>, what: &str) {
    let names = found.keys().chain(listed.keys()).filter(|name| found.get(name) != listed.get(name));
    let wrong: BTreeMap<_, _> = names.map(|name| (name, (found.get(name), listed.get(name)))).collect();
    assert!(
        wrong.is_empty(),
        "{what}, as they are and as the list in tests/structure/tests/product.rs has them: {wrong:#?}"
    );
}
