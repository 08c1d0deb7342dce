//! URLs and settings, good and bad.

use super::*;

#[test]
fn urls_name_members_and_a_prefix() {
    for (text, members, prefix, tls) in [
        ("etcd://a:1,b,c:3", &["a:1", "b:2379", "c:3"][..], "gradfs", false),
        ("etcds://10.0.0.1:2379/train/one/", &["10.0.0.1:2379"], "train/one", true),
        ("etcd://[::1]:7,[fe80::2]", &["[::1]:7", "[fe80::2]:2379"], "gradfs", false),
    ] {
        let url = EtcdUrl::parse(text).unwrap();
        let members: Vec<String> = members.iter().map(|&member| member.to_owned()).collect();
        assert_eq!((&url.members, &*url.prefix, url.tls), (&members, prefix, tls));
        assert_eq!(EtcdUrl::parse(&url.to_string()).unwrap(), url);
    }
}

#[test]
fn what_is_no_url_is_refused_in_one_line() {
    for (text, why) in [
        ("http://a", "neither etcd://"),
        ("etcd://", "no host:port"),
        ("etcd://a,,b", "no host:port"),
        ("etcd://a:0", "port is 0"),
        ("etcd://a:http", "no number"),
        ("etcd://a:99999", "no number"),
        ("etcd://::1", "no host:port"),
        ("etcd://a/p q", "blanks"),
        ("etcd://root:secret@a", "GRADFS_ETCD_USER"),
    ] {
        let error = EtcdUrl::parse(text).unwrap_err().to_string();
        assert!(error.contains(why) && !error.contains('\n') && !error.contains("secret"), "{text}: {error}");
    }
}

#[test]
fn settings_that_miss_another_one_are_refused() {
    let of = |set: &'static [(&'static str, &'static str)]| {
        Credentials::of(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    };
    assert!(of(&[]).is_ok() && of(&[("USER", "u"), ("PASSWORD", "p")]).is_ok());
    let debug = format!("{:?}", of(&[("USER", "u"), ("PASSWORD", "secret")]).unwrap());
    assert!(debug.contains('u') && !debug.contains("secret"), "{debug}");
    for (set, why) in [
        (&[("USER", "u")][..], "PASSWORD_FILE"),
        (&[("PASSWORD", "p")], "GRADFS_ETCD_USER"),
        (&[("USER", "u"), ("PASSWORD", "p"), ("PASSWORD_FILE", "f")], "unset one"),
        (&[("USER", "u"), ("PASSWORD_FILE", "/nonexistent/f")], "cannot read /nonexistent/f"),
        (&[("CERT", "c")], "both or none"),
    ] {
        let error = of(set).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let (plain, tls) = (EtcdUrl::parse("etcd://a").unwrap(), EtcdUrl::parse("etcds://a").unwrap());
    assert!(of(&[("CA", "/ca")]).unwrap().endpoints(&plain).unwrap_err().to_string().contains("etcds://"));
    assert!(of(&[]).unwrap().endpoints(&tls).unwrap_err().to_string().contains("GRADFS_ETCD_CA"));
}
