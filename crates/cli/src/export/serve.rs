//! The HTTP server: two pages, GET and HEAD, one request a connection.
//!
//! Any client that can reach the address may connect, so requests have a deadline, a maximum length
//! and a limit of connections: of too many, the server closes the one that has waited longest for
//! its client, never a scraper, which sends its request and reads its answer at once. The parser is
//! hyper's (`httparse`); a server with keep-alive, chunks and upgrades would offer more to attack
//! and nothing that a scraper needs.
#![deny(unsafe_code, clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::collect::Collector;
use super::exposition::{self, Family, Format};
use crate::failure::Failure;

/// The most connections at a time.
const MOST_CONNECTIONS: usize = 32;
/// Limit for a request to arrive, and again for its answer to leave.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest request.
const MOST_BYTES: usize = 16 << 10;
/// Requests within this time share a read of the records.
const FRESH: Duration = Duration::from_millis(100);

/// Locks; after another holder's panic, the server continues.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks the form of an address with a port. Whether the name exists is known only when it is
/// looked up.
///
/// # Errors
/// No address, or no port.
pub fn address(text: &str) -> Result<String, String> {
    match text.rsplit_once(':') {
        Some((address, port)) if !address.is_empty() && port.parse::<u16>().is_ok() => {
            Ok(text.to_owned())
        }
        _ => Err("expected an address and a port, as in 127.0.0.1:9404".to_owned()),
    }
}

/// Listens at `address`.
///
/// # Errors
/// `address` is unknown, or can't be bound.
pub fn listen(address: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let addresses: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| {
            Failure::new(format_args!(
                "--listen {address}: {error}; name an address and a port, as in 127.0.0.1:9404"
            ))
        })?
        .collect();
    let listener = TcpListener::bind(&addresses[..]).map_err(|error| {
        let remedy = match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another exporter or program uses it: one exporter covers all processes of the \
                 machine; stop that one, or choose another port with --listen"
            }
            io::ErrorKind::PermissionDenied => {
                "ports below 1024 are reserved for the system: choose another with --listen"
            }
            io::ErrorKind::AddrNotAvailable => {
                "this machine has no such address: `ip addr` lists those it has"
            }
            _ => "choose another with --listen",
        };
        Failure::new(format_args!("--listen {address}: {error}; {remedy}"))
    })?;
    let at = listener
        .local_addr()
        .map_err(|error| Failure::new(format_args!("--listen {address}: {error}")))?;
    Ok((listener, at))
}

/// Open connections.
#[derive(Default)]
struct Guests {
    /// Connections that wait for their client, to send a whole request or to read its answer:
    /// longest first.
    waiting: VecDeque<(u64, TcpStream)>,
    /// Number of connections.
    all: usize,
    next: u64,
}

/// Reads records, with a limit of frequency.
struct Looks {
    collector: Collector,
    latest: Option<(Instant, Vec<Family>)>,
}

/// Serves forever.
pub fn serve(listener: &TcpListener, collector: Collector) -> ! {
    let guests = Mutex::new(Guests::default());
    let looks = Mutex::new(Looks { collector, latest: None });
    std::thread::scope(|scope| {
        loop {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                // Out of descriptors, for example: wait, rather than spin.
                Err(_) => {
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
            };
            let Some(number) = admit(&guests, &stream) else { continue };
            let (guests, looks) = (&guests, &looks);
            let spawned =
                std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, move || {
                    // An error of a connection concerns only that connection.
                    let _leaving = Leaving(guests, number);
                    let _ = answer(stream, number, guests, looks);
                });
            if spawned.is_err() {
                leave(guests, number);
            }
        }
    })
}

/// Removes the connection at the end of its thread, also after a panic.
struct Leaving<'a>(&'a Mutex<Guests>, u64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        leave(self.0, self.1);
    }
}

/// Makes room for a connection; returns its number.
fn admit(guests: &Mutex<Guests>, stream: &TcpStream) -> Option<u64> {
    let copy = stream.try_clone().ok()?;
    let mut guests = lock(guests);
    if guests.all >= MOST_CONNECTIONS {
        // Its thread wakes up and leaves. If no client is waited for, this connection is the only
        // one to refuse.
        let (_, oldest) = guests.waiting.pop_front()?;
        let _ = oldest.shutdown(Shutdown::Both);
    }
    guests.next += 1;
    let number = guests.next;
    guests.waiting.push_back((number, copy));
    guests.all += 1;
    Some(number)
}

/// Its request is whole: it is not closed while the server works. `None`: closed to make room.
fn heard(guests: &Mutex<Guests>, number: u64) -> Option<TcpStream> {
    let waiting = &mut lock(guests).waiting;
    let place = waiting.iter().position(|(other, _)| *other == number)?;
    waiting.remove(place).map(|(_, stream)| stream)
}

/// Its client has to read the answer.
fn answered(guests: &Mutex<Guests>, number: u64, stream: TcpStream) {
    lock(guests).waiting.push_back((number, stream));
}

fn leave(guests: &Mutex<Guests>, number: u64) {
    let mut guests = lock(guests);
    guests.waiting.retain(|(other, _)| *other != number);
    guests.all -= 1;
}

/// The relevant part of a request.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    method: String,
    path: String,
    accept: String,
}

/// Parses the bytes of a complete request; `None`: incomplete.
fn parse(bytes: &[u8]) -> Result<Option<Asked>, httparse::Error> {
    let mut headers = [httparse::EMPTY_HEADER; 64];
    let mut request = httparse::Request::new(&mut headers);
    if request.parse(bytes)?.is_partial() {
        return Ok(None);
    }
    let text = |part: Option<&str>| part.unwrap_or("").to_owned();
    let accept = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case("accept"));
    let accept: Vec<_> = accept.map(|header| String::from_utf8_lossy(header.value)).collect();
    Ok(Some(Asked {
        method: text(request.method),
        path: text(request.path),
        accept: accept.join(","),
    }))
}

/// Reads a request until `deadline`.
fn read(stream: &mut TcpStream, deadline: Instant) -> io::Result<Result<Asked, &'static str>> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Err("408 Request Timeout"));
        }
        stream.set_read_timeout(Some(left))?;
        let got = match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => got,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) =>
            {
                return Ok(Err("408 Request Timeout"));
            }
            Err(error) => return Err(error),
        };
        bytes.extend_from_slice(&buffer[..got]);
        // Also if it is whole: what is too long does not depend on how it arrives.
        if bytes.len() > MOST_BYTES {
            return Ok(Err("431 Request Header Fields Too Large"));
        }
        match parse(&bytes) {
            Ok(Some(asked)) => return Ok(Ok(asked)),
            Ok(None) => {}
            Err(_) => return Ok(Err("400 Bad Request")),
        }
    }
}

/// Writes all of `bytes` until `deadline`, however slowly the client reads.
fn write(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

const PLAIN: &str = "text/plain; charset=utf-8";
const FRONT: &str = "<!DOCTYPE html><html><head><title>gruyere \
                     export</title></head><body><h1>gruyere export</h1><p><a \
                     href=\"/metrics\">/metrics</a> <a \
                     href=\"/-/healthy\">/-/healthy</a></p></body></html>\n";

fn answer(
    mut stream: TcpStream,
    number: u64,
    guests: &Mutex<Guests>,
    looks: &Mutex<Looks>,
) -> io::Result<()> {
    let asked = read(&mut stream, Instant::now() + PATIENCE);
    let Some(copy) = heard(guests, number) else { return Ok(()) };
    let (status, kind, body, head) = match asked? {
        Err(status) => (status, PLAIN, format!("{status}\n"), false),
        Ok(Asked { method, path, accept }) => {
            let head = method == "HEAD";
            let (status, kind, body) = if head || method == "GET" {
                page(path.split('?').next().unwrap_or(""), &accept, looks)
            } else {
                ("405 Method Not Allowed", PLAIN, "only GET and HEAD\n".to_owned())
            };
            (status, kind, body, head)
        }
    };
    let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
    let mut out = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Connection: \
         close\r\n\
         X-Content-Type-Options: nosniff\r\n\r\n",
        body.len()
    );
    if !head {
        out.push_str(&body);
    }
    answered(guests, number, copy);
    write(&mut stream, out.as_bytes(), Instant::now() + PATIENCE)?;
    stream.shutdown(Shutdown::Write)
}

fn page(path: &str, accept: &str, looks: &Mutex<Looks>) -> (&'static str, &'static str, String) {
    match path {
        "/metrics" => {
            let format = Format::accepted(accept);
            match look(&mut lock(looks), format) {
                Ok(text) => ("200 OK", format.content_type(), text),
                Err(failure) => ("500 Internal Server Error", PLAIN, format!("{failure}\n")),
            }
        }
        "/-/healthy" => ("200 OK", PLAIN, "healthy\n".to_owned()),
        "/" => ("200 OK", "text/html; charset=utf-8", FRONT.to_owned()),
        _ => ("404 Not Found", PLAIN, "there are /metrics and /-/healthy\n".to_owned()),
    }
}

fn look(looks: &mut Looks, format: Format) -> Result<String, Failure> {
    let families = match &looks.latest {
        Some((at, families)) if at.elapsed() < FRESH => families,
        _ => {
            let families = looks.collector.look()?;
            &looks.latest.insert((Instant::now(), families)).1
        }
    };
    Ok(exposition::write(families, format))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_in_pieces_and_their_accepts_joined() {
        let request =
            b"GET /metrics?x=1 HTTP/1.1\r\nHost: h\r\nACCEPT: text/plain;q=0.5\r\nAccept: a/b\r\n\
              \r\n";
        for end in 0..request.len() {
            assert_eq!(parse(&request[..end]).expect("so far so good"), None, "{end}");
        }
        let asked = parse(request).expect("good").expect("whole");
        assert_eq!((asked.method.as_str(), asked.path.as_str()), ("GET", "/metrics?x=1"));
        assert_eq!(asked.accept, "text/plain;q=0.5,a/b");
        assert!(parse(b"\x00\x01\x02 nonsense\r\n\r\n").is_err());
    }

    #[test]
    fn a_client_that_does_not_read_its_answer_makes_room_for_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let connect = || {
            let client = TcpStream::connect(address).expect("it listens");
            (client, listener.accept().expect("a connection").0)
        };
        let guests = Mutex::new(Guests::default());
        let mut pairs: Vec<_> = (0..MOST_CONNECTIONS).map(|_| connect()).collect();
        for (_, stream) in &pairs {
            let number = admit(&guests, stream).expect("room");
            let copy = heard(&guests, number).expect("open");
            answered(&guests, number, copy);
        }
        let oldest = &mut pairs[0].1;
        std::thread::scope(|scope| {
            let began = Instant::now();
            // More than the kernel buffers for a client that does not read.
            let writing =
                scope.spawn(move || write(oldest, &vec![b'x'; 64 << 20], began + PATIENCE));
            let (_scraper, stream) = connect();
            assert!(admit(&guests, &stream).is_some(), "the scraper is let in");
            assert!(writing.join().expect("no panic").is_err(), "the slow one is closed");
            assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
        });
    }
}
