//! As much HTTP as a scrape takes: requests and their answers. It has no socket and no clock.
//!
//! A connection carries one request, without a body. Anything else is refused, and the connection ends.

use std::fmt::Write as _;

/// Most bytes of a request, its headers included.
pub const MAX_REQUEST: usize = 8 << 10;
/// Most headers.
const MAX_HEADERS: usize = 64;
/// The path of metrics.
const PATH: &str = "/metrics";

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The request is incomplete.
    More,
    /// The request asks for the metrics; only for their length, if it `is_head`.
    Metrics { is_head: bool },
    /// The request asks for something else, or is no request.
    Refused(Refusal),
}

/// Why there are no metrics in the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request is not HTTP.
    Malformed,
    /// The path is not that of metrics.
    NotFound,
    /// The method is neither GET nor HEAD.
    Method,
    /// The request is longer than a scrape's.
    TooLong,
    /// They could not be collected.
    Failed,
}

impl Refusal {
    fn status(self) -> &'static str {
        match self {
            Refusal::Malformed => "400 Bad Request",
            Refusal::NotFound => "404 Not Found",
            Refusal::Method => "405 Method Not Allowed",
            Refusal::TooLong => "431 Request Header Fields Too Large",
            Refusal::Failed => "500 Internal Server Error",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Refusal::Malformed => "this is no HTTP request\n",
            Refusal::NotFound => "metrics are at /metrics\n",
            Refusal::Method => "metrics can only be read: GET /metrics\n",
            Refusal::TooLong => "the request is too long\n",
            Refusal::Failed => "metrics cannot be collected: the log tells why\n",
        }
    }
}

/// The request at the beginning of a connection.
pub fn asked(bytes: &[u8]) -> Asked {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(bytes) {
        Ok(httparse::Status::Partial) if bytes.len() < MAX_REQUEST => return Asked::More,
        Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
            return Asked::Refused(Refusal::TooLong);
        }
        Err(_) => return Asked::Refused(Refusal::Malformed),
        Ok(httparse::Status::Complete(_)) => {}
    }
    let path = request.path.and_then(|target| target.split('?').next());
    match (path, request.method) {
        (Some(PATH), Some("GET")) => Asked::Metrics { is_head: false },
        (Some(PATH), Some("HEAD")) => Asked::Metrics { is_head: true },
        (Some(PATH), _) => Asked::Refused(Refusal::Method),
        _ => Asked::Refused(Refusal::NotFound),
    }
}

/// The answer with metrics.
pub fn metrics(text: &str, is_head: bool) -> Vec<u8> {
    answer("200 OK", prometheus::TEXT_FORMAT, text, is_head)
}

/// The answer without.
pub fn refusal(refusal: Refusal) -> Vec<u8> {
    answer(refusal.status(), "text/plain; charset=utf-8", refusal.text(), false)
}

fn answer(status: &str, content: &str, text: &str, is_head: bool) -> Vec<u8> {
    let mut answer =
        format!("HTTP/1.1 {status}\r\nContent-Type: {content}\r\nContent-Length: {}\r\n", text.len());
    if status.starts_with("405") {
        answer.push_str("Allow: GET, HEAD\r\n");
    }
    let _ = write!(answer, "Connection: close\r\n\r\n{}", if is_head { "" } else { text });
    answer.into_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_understood() {
        let metrics = Asked::Metrics { is_head: false };
        for (request, wanted) in [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", metrics),
            ("GET /metrics HTTP/1.0\r\n\r\n", metrics),
            ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", metrics),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", Asked::Metrics { is_head: true }),
            ("", Asked::More),
            ("GET /metr", Asked::More),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n", Asked::More),
            ("POST /metrics HTTP/1.1\r\n\r\n", Asked::Refused(Refusal::Method)),
            ("GET / HTTP/1.1\r\n\r\n", Asked::Refused(Refusal::NotFound)),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", Asked::Refused(Refusal::NotFound)),
            ("POST / HTTP/1.1\r\n\r\n", Asked::Refused(Refusal::NotFound)),
            ("\x16\x03\x01\x02\x00", Asked::Refused(Refusal::Malformed)),
            ("GET /metrics\r\n\r\n", Asked::Refused(Refusal::Malformed)),
        ] {
            assert_eq!(asked(request.as_bytes()), wanted, "{request:?}");
        }
    }

    #[test]
    fn requests_that_are_too_long_are_refused() {
        let long = format!("GET /metrics HTTP/1.1\r\nX: {}", "a".repeat(MAX_REQUEST));
        assert_eq!(asked(&long.as_bytes()[..MAX_REQUEST - 1]), Asked::More);
        assert_eq!(asked(&long.as_bytes()[..MAX_REQUEST]), Asked::Refused(Refusal::TooLong));
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1));
        assert_eq!(asked(many.as_bytes()), Asked::Refused(Refusal::TooLong));
    }

    #[test]
    fn answers_are_whole() {
        let answer = String::from_utf8(metrics("a 1\n", false)).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), "{answer}");
        assert!(answer.ends_with("\r\nContent-Length: 4\r\nConnection: close\r\n\r\na 1\n"), "{answer}");
        let head = String::from_utf8(metrics("a 1\n", true)).unwrap();
        assert_eq!(head, answer.strip_suffix("a 1\n").unwrap());
        let method = String::from_utf8(refusal(Refusal::Method)).unwrap();
        assert!(
            method.starts_with("HTTP/1.1 405 ") && method.contains("\r\nAllow: GET, HEAD\r\n"),
            "{method}"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..=MAX_REQUEST)) {
            let more = asked(&bytes) == Asked::More;
            prop_assert!(!more || bytes.len() < MAX_REQUEST);
        }

        #[test]
        fn it_is_the_same_however_it_comes(cut in 0usize..40) {
            let request = b"GET /metrics HTTP/1.1\r\nHost: node1\r\n\r\n";
            prop_assert_eq!(asked(&request[..cut.min(request.len() - 1)]), Asked::More);
        }
    }
}
