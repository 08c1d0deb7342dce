//! Where an etcd is, and how a client proves who it is.

use std::fmt;
use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use super::EtcdError;

const PLAIN: &str = "etcd://";
const TLS: &str = "etcds://";
const DEFAULT_PORT: u16 = 2379;
const DEFAULT_PREFIX: &str = "gradfs";

/// The members of an etcd, and the prefix of the keys: `etcd://a:2379,b:2379,c:2379/prefix`, and `etcds://` for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUrl {
    /// Each as `host:port`.
    pub members: Vec<String>,
    /// Before each key, without the slash between.
    pub prefix: String,
    /// Connections are by TLS.
    pub tls: bool,
}

impl EtcdUrl {
    /// Whether `text` is meant to be such a URL.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with(PLAIN) || text.starts_with(TLS)
    }

    /// The URL in `text`.
    ///
    /// # Errors
    /// [`EtcdError::Url`].
    pub fn parse(text: &str) -> Result<EtcdUrl, EtcdError> {
        let wrong = |why: &str| EtcdError::Url { url: text.to_owned(), why: why.to_owned() };
        let rest = text.strip_prefix(PLAIN).or_else(|| text.strip_prefix(TLS));
        let rest = rest.ok_or_else(|| wrong("it begins with neither etcd:// nor etcds://"))?;
        let (members, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if members.contains('@') {
            // The URL itself is not repeated: it has a password.
            let url = text.split("//").next().unwrap_or_default().to_owned() + "//…@…";
            let why =
                "other users would see a password there: set GRADFS_ETCD_USER and GRADFS_ETCD_PASSWORD_FILE";
            return Err(EtcdError::Url { url, why: why.to_owned() });
        }
        let prefix = prefix.trim_matches('/');
        if prefix.contains(|c: char| c.is_control() || c.is_whitespace()) || prefix.len() > 255 {
            return Err(wrong("its prefix has blanks, or is longer than 255 bytes"));
        }
        let prefix = if prefix.is_empty() { DEFAULT_PREFIX } else { prefix }.to_owned();
        let members = members.split(',').map(|member| address(member).map_err(wrong));
        Ok(EtcdUrl { members: members.collect::<Result<_, _>>()?, prefix, tls: text.starts_with(TLS) })
    }
}

impl fmt::Display for EtcdUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { TLS } else { PLAIN };
        write!(f, "{scheme}{}", self.members.join(","))?;
        if self.prefix == DEFAULT_PREFIX { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

/// A member's `host:port`, the port given or not.
fn address(member: &str) -> Result<String, &'static str> {
    // The colons of an IPv6 address are in brackets.
    let (host, port) = match member.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().map_err(|_| "a port is no number")?),
        _ => (member, DEFAULT_PORT),
    };
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    match inner {
        Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => {}
        None if !host.is_empty() && host.chars().all(is_name) => {}
        _ => return Err("a member is no host:port, as in etcd://a:2379,b:2379,c:2379"),
    }
    if port == 0 { Err("a port is 0") } else { Ok(format!("{host}:{port}")) }
}

/// What a client proves who it is with, and knows the members by.
#[derive(Clone, Default)]
pub struct Credentials {
    user: Option<(String, String)>,
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = self.user.as_ref().map(|(user, _)| user);
        f.debug_struct("Credentials").field("user", &user).field("ca", &self.ca).finish_non_exhaustive()
    }
}

impl Credentials {
    /// Those in the environment: `GRADFS_ETCD_USER`, `GRADFS_ETCD_PASSWORD` or `GRADFS_ETCD_PASSWORD_FILE`,
    /// `GRADFS_ETCD_CA`, `GRADFS_ETCD_CERT` and `GRADFS_ETCD_KEY`. An empty variable counts as unset.
    ///
    /// # Errors
    /// [`EtcdError::Setting`] for one that another is missing to, and for files that cannot be read.
    pub fn of_environment() -> Result<Credentials, EtcdError> {
        Credentials::of(|name| {
            std::env::var(format!("GRADFS_ETCD_{name}")).ok().filter(|text| !text.is_empty())
        })
    }

    pub(super) fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Credentials, EtcdError> {
        let setting = |text: &str| EtcdError::Setting(text.to_owned());
        let password = match (variable("PASSWORD"), variable("PASSWORD_FILE")) {
            (Some(_), Some(_)) => {
                return Err(setting("GRADFS_ETCD_PASSWORD and GRADFS_ETCD_PASSWORD_FILE are set: unset one"));
            }
            (None, Some(file)) => Some(text(Path::new(&file))?.trim_end_matches(['\r', '\n']).to_owned()),
            (password, None) => password,
        };
        let user = match (variable("USER"), password) {
            (Some(user), Some(password)) => Some((user, password)),
            (Some(_), None) => {
                return Err(setting("GRADFS_ETCD_USER is set: set GRADFS_ETCD_PASSWORD_FILE, too"));
            }
            (None, Some(_)) => return Err(setting("a password of etcd is set: set GRADFS_ETCD_USER, too")),
            (None, None) => None,
        };
        let identity = match (variable("CERT"), variable("KEY")) {
            (Some(cert), Some(key)) => Some((cert.into(), key.into())),
            (None, None) => None,
            _ => return Err(setting("GRADFS_ETCD_CERT and GRADFS_ETCD_KEY go together: set both or none")),
        };
        Ok(Credentials { user, ca: variable("CA").map(PathBuf::from), identity })
    }

    /// The user, and the password.
    pub(super) fn user(&self) -> Option<&(String, String)> {
        self.user.as_ref()
    }

    /// How the members of `url` are reached.
    pub(super) fn endpoints(&self, url: &EtcdUrl) -> Result<Vec<Endpoint>, EtcdError> {
        let setting = |text: &str| EtcdError::Setting(text.to_owned());
        let tls = match (&self.ca, url.tls) {
            (Some(ca), true) => {
                let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(text(ca)?));
                Some(match &self.identity {
                    Some((cert, key)) => tls.identity(Identity::from_pem(text(cert)?, text(key)?)),
                    None => tls,
                })
            }
            (None, true) => {
                return Err(setting("etcds:// needs GRADFS_ETCD_CA, the certificate of its authority"));
            }
            (_, false) if self.ca.is_some() || self.identity.is_some() => {
                return Err(setting("certificates of etcd are set: write etcds:// for TLS"));
            }
            (_, false) => None,
        };
        let endpoint = |member: &String| {
            let wrong = |error: tonic::transport::Error| {
                let why = super::deepest(&error);
                EtcdError::Setting(format!("etcd at {member} cannot be reached so: {why}"))
            };
            let scheme = if url.tls { "https" } else { "http" };
            let endpoint = Endpoint::from_shared(format!("{scheme}://{member}")).map_err(wrong)?;
            match &tls {
                Some(tls) => endpoint.tls_config(tls.clone()).map_err(wrong),
                None => Ok(endpoint),
            }
        };
        url.members.iter().map(endpoint).collect()
    }
}

fn text(path: &Path) -> Result<String, EtcdError> {
    let failed = |error| EtcdError::Setting(format!("cannot read {}: {error}", path.display()));
    std::fs::read_to_string(path).map_err(failed)
}

#[cfg(test)]
mod tests;
