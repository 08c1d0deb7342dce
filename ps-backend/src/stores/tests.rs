//! All kinds of stores keep the same promises.

use std::sync::Arc;

use object_store::memory::InMemory;

use super::{Bucket, Directory, Existing, Listed, Objects, StoreError, is_url, open, path_of};

fn stores() -> (tempfile::TempDir, Vec<Arc<dyn Objects>>) {
    let dir = tempfile::tempdir().unwrap();
    let directory: Arc<dyn Objects> = Arc::new(Directory::new(&dir.path().join("deep/er")));
    let memory = Bucket::new("memory:///".into(), Arc::new(InMemory::new()), Default::default());
    (dir, vec![directory, Arc::new(memory)])
}

#[test]
fn an_object_is_there_as_a_whole_and_replaced_as_it_is_asked_for() {
    let (_dir, stores) = stores();
    for store in stores {
        assert!(matches!(store.get("a/b"), Err(StoreError::Missing(_))), "{store:?}");
        assert_eq!(store.list("a").unwrap(), []);
        store.put("a/b", &[b"he", b"", b"llo"], Existing::Kept).unwrap();
        let again = store.put("a/b", &[b"other"], Existing::Kept);
        assert!(matches!(again, Err(StoreError::Exists(_))), "{again:?}");
        assert_eq!(store.get("a/b").unwrap(), b"hello");
        store.put("a/b", &[b"others"], Existing::Replaced).unwrap();
        let mut bytes = [0; 4];
        store.read_at("a/b", 2, &mut bytes).unwrap();
        assert_eq!(&bytes, b"hers");
        store.read_at("a/b", 3, &mut bytes).unwrap_err();
        assert_eq!(store.list("a").unwrap(), [Listed { name: "a/b".into(), bytes: 6 }]);
        store.delete("a/b").unwrap();
        store.delete("a/b").unwrap();
        assert_eq!(store.list("a").unwrap(), []);
    }
}

#[test]
fn long_objects_arrive_whole() {
    let (_dir, stores) = stores();
    let bytes: Vec<u8> = (0..20_000_003_u32).map(|at| (at * 7) as u8).collect();
    let parts: Vec<&[u8]> = bytes.chunks(3_000_001).collect();
    for store in stores {
        store.put("long", &parts, Existing::Replaced).unwrap();
        assert!(store.get("long").unwrap() == bytes, "{store:?}");
    }
}

#[test]
fn what_a_writer_has_left_is_no_object_and_can_be_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Directory::new(dir.path());
    store.put("a/b", &[b"x"], Existing::Kept).unwrap();
    std::fs::write(dir.path().join("a/c.partial-0123456789abcdef"), "half").unwrap();
    assert_eq!(store.list("a").unwrap().len(), 1);
    store.tidy("a").unwrap();
    let left: Vec<_> = std::fs::read_dir(dir.path().join("a")).unwrap().collect();
    assert_eq!(left.len(), 1);
}

#[test]
fn a_file_that_is_none_keeps_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let why = Directory::new(dir.path()).get("pipe").unwrap_err().to_string();
    assert!(why.contains("no regular file"), "{why}");
}

#[test]
fn addresses_say_which_store_they_mean() {
    assert!(is_url("s3://bucket") && is_url("file:///x") && !is_url("/a/b://c") && !is_url("dir"));
    assert_eq!(path_of("file:///x/y"), Some("/x/y".into()));
    assert_eq!(path_of("x"), Some("x".into()));
    assert_eq!(path_of("s3://x"), None);
    for bad in ["ftp://host/x", "file://relative", "http://host/x", "memory:///"] {
        let why = open(bad).unwrap_err().to_string();
        assert!(why.contains(bad), "{why}");
    }
}
