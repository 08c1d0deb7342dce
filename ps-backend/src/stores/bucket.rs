//! Objects of an object store, by the crate `object_store`. It retries with growing pauses what fails for a moment.

use std::sync::Arc;
use std::time::Duration;

use super::{Existing, Listed, MAX_WHOLE, Objects, StoreError};
use gradfs_stores::runtime::block_on;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, ObjectStore, ObjectStoreExt as _, ObjectStoreScheme, PutMode, PutPayload, RetryConfig,
    WriteMultipart,
};

/// Longer objects travel in parts, so that what fails is sent again in part.
const PART_BYTES: usize = 8 << 20;
/// The parts of an object that are under way at once.
const PARTS_AT_ONCE: usize = 4;
/// The longest wait for one part, or for one request without an object, with all that is tried again.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long a request is tried again.
const RETRIES: Duration = Duration::from_secs(60);

/// A bucket, and a folder in it.
#[derive(Debug)]
pub struct Bucket {
    url: String,
    store: Arc<dyn ObjectStore>,
    folder: Path,
}

/// Has TLS use the same cryptography as the rest of gradfs.
fn choose_cryptography() {
    // Whoever has chosen before has the last word.
    let _ = rustls::crypto::ring::default_provider().install_default();
}

impl Bucket {
    /// The bucket and the folder of an address.
    ///
    /// # Errors
    /// [`StoreError::Url`].
    pub fn open(url: &str) -> Result<Bucket, StoreError> {
        choose_cryptography();
        let bad = |why: String| StoreError::Url { url: url.to_owned(), why };
        let unknown = || bad("a path, file://, s3://, gs:// or az:// is expected".into());
        let parsed = url::Url::parse(url).map_err(|error| bad(error.to_string()))?;
        let (scheme, folder) = ObjectStoreScheme::parse(&parsed).map_err(|_| unknown())?;
        let retry = RetryConfig { retry_timeout: RETRIES, max_retries: usize::MAX, ..RetryConfig::default() };
        let store: Result<Arc<dyn ObjectStore>, Error> = match scheme {
            ObjectStoreScheme::AmazonS3 => AmazonS3Builder::from_env()
                .with_url(url)
                .with_retry(retry)
                .build()
                .map(|made| Arc::new(made) as _),
            ObjectStoreScheme::GoogleCloudStorage => GoogleCloudStorageBuilder::from_env()
                .with_url(url)
                .with_retry(retry)
                .build()
                .map(|made| Arc::new(made) as _),
            ObjectStoreScheme::MicrosoftAzure => MicrosoftAzureBuilder::from_env()
                .with_url(url)
                .with_retry(retry)
                .build()
                .map(|made| Arc::new(made) as _),
            _ => return Err(unknown()),
        };
        Ok(Bucket::new(url.to_owned(), store.map_err(|error| bad(error.to_string()))?, folder))
    }

    /// A folder of a store.
    pub fn new(url: String, store: Arc<dyn ObjectStore>, folder: Path) -> Bucket {
        Bucket { url: url.trim_end_matches('/').to_owned(), store, folder }
    }

    fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.folder.clone(), |path, word| path.join(word))
    }

    fn failed(&self, name: &str, why: impl ToString) -> StoreError {
        StoreError::Failed { name: format!("{}/{name}", self.url), why: why.to_string() }
    }

    /// Waits for what the store answers, `patience` at most.
    fn wait<T>(
        &self,
        name: &str,
        patience: Duration,
        asked: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, StoreError> {
        let answered = block_on(async { tokio::time::timeout(patience, asked).await });
        match answered.map_err(|error| self.failed(name, error))? {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Error::NotFound { .. })) => Err(StoreError::Missing(format!("{}/{name}", self.url))),
            Ok(Err(Error::AlreadyExists { .. } | Error::Precondition { .. })) => {
                Err(StoreError::Exists(format!("{}/{name}", self.url)))
            }
            Ok(Err(error)) => Err(self.failed(name, one_line(&error))),
            Err(_) => Err(self.failed(name, format!("no answer within {} s", patience.as_secs()))),
        }
    }
}

/// The error with its causes. Of a server's answer in XML it has the status, the code and the message.
fn one_line(error: &Error) -> String {
    const LONGEST: usize = 400;
    let text = error.to_string();
    let within = |tag: &str| {
        let (_, rest) = text.split_once(&format!("<{tag}>"))?;
        Some(rest.split_once(&format!("</{tag}>"))?.0.trim().to_owned())
    };
    let said = match within("Code") {
        None => {
            let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
            // Of its retries, the number is enough.
            let parts = line.split_once(", max_retries: ");
            let parts = parts.and_then(|(start, rest)| Some((start, rest.split_once(" - ")?.1)));
            parts.map_or_else(|| line.clone(), |(start, end)| format!("{start}: {end}"))
        }
        Some(code) => {
            let status = text.split_once("status code: ").and_then(|(_, rest)| rest.get(..3));
            let message = within("Message").unwrap_or_default();
            format!("{} {code}: {message}", status.unwrap_or_default())
        }
    };
    said.trim().chars().take(LONGEST).collect()
}

impl Objects for Bucket {
    fn url(&self) -> &str {
        &self.url
    }

    fn put(&self, name: &str, parts: &[&[u8]], existing: Existing) -> Result<(), StoreError> {
        let path = self.path(name);
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let patience = PATIENCE * (len / PART_BYTES + 1) as u32;
        // A condition goes with an object that is sent at once.
        if len <= PART_BYTES || existing == Existing::Kept {
            let payload = PutPayload::from(parts.concat());
            let mode = match existing {
                Existing::Replaced => PutMode::Overwrite,
                Existing::Kept => PutMode::Create,
            };
            return self.wait(name, patience, self.store.put_opts(&path, payload, mode.into())).map(drop);
        }
        let sent = async {
            let upload = self.store.put_multipart(&path).await?;
            let mut upload = WriteMultipart::new_with_chunk_size(upload, PART_BYTES);
            for part in parts.iter().flat_map(|part| part.chunks(PART_BYTES)) {
                if let Err(error) = upload.wait_for_capacity(PARTS_AT_ONCE).await {
                    let _ = upload.abort().await;
                    return Err(error);
                }
                upload.write(part);
            }
            upload.finish().await
        };
        self.wait(name, patience, sent).map(drop)
    }

    fn get(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let path = self.path(name);
        let asked = async {
            let found = self.store.get_opts(&path, GetOptions::default()).await?;
            let len = found.meta.size;
            Ok((len, if len <= MAX_WHOLE { Some(found.bytes().await?) } else { None }))
        };
        match self.wait(name, PATIENCE, asked)? {
            (len, Some(bytes)) if bytes.len() as u64 == len => Ok(bytes.to_vec()),
            (len, Some(bytes)) => Err(self.failed(name, format!("{} of its {len} bytes came", bytes.len()))),
            (len, None) => Err(self.failed(name, format!("it has {len} bytes, the most is {MAX_WHOLE}"))),
        }
    }

    fn read_at(&self, name: &str, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        let range = offset..offset + bytes.len() as u64;
        let path = self.path(name);
        let came = self.wait(name, PATIENCE, self.store.get_range(&path, range))?;
        if came.len() != bytes.len() {
            let why = format!("{} bytes came from byte {offset} on, not {}", came.len(), bytes.len());
            return Err(self.failed(name, why));
        }
        bytes.copy_from_slice(&came);
        Ok(())
    }

    fn list(&self, folder: &str) -> Result<Vec<Listed>, StoreError> {
        let path = self.path(folder);
        let listed = self.wait(folder, PATIENCE, self.store.list_with_delimiter(Some(&path)))?;
        let of_object = |object: object_store::ObjectMeta| {
            let name = object.location.filename()?;
            Some(Listed { name: format!("{folder}/{name}"), bytes: object.size })
        };
        let mut listed: Vec<Listed> = listed.objects.into_iter().filter_map(of_object).collect();
        listed.sort_unstable();
        Ok(listed)
    }

    fn delete(&self, name: &str) -> Result<(), StoreError> {
        let path = self.path(name);
        match self.wait(name, PATIENCE, self.store.delete(&path)) {
            Err(StoreError::Missing(_)) => Ok(()),
            deleted => deleted,
        }
    }

    /// What was sent in part is no object: a rule of the bucket removes it.
    fn tidy(&self, _: &str) -> Result<(), StoreError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_bucket_is_one_line_without_what_nobody_has_set() {
        let line = |source: &str| one_line(&Error::Generic { store: "S3", source: source.into() });
        let retried = "performing GET http://h/b in 60.6s, after 61 retries, max_retries: 18446744073709551615, \
                       retry_timeout: 60s - HTTP error: error\nsending request";
        let said = "Generic S3 error: performing GET http://h/b in 60.6s, after 61 retries: HTTP error: error sending request";
        assert_eq!(line(retried), said);
        let answered = "status code: 403, <Error>\n<Code>AccessDenied</Code><Message>no</Message></Error>";
        assert_eq!(line(answered), "403 AccessDenied: no");
    }
}
