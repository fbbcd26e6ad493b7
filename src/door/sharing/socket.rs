//! Messages with open files between processes of one user, over abstract Unix sockets.
//!
//! A name of an abstract socket is no file: it is gone with the process. Every process of the
//! network namespace sees it and may connect, so both ends ask the kernel who the other is.

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, geteuid};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Files in one message, at most: few enough for a process that has few left, and for the sender's
/// lock, under which they are opened.
pub(super) const MOST_FILES: usize = 8;
/// Bytes in one message, at most.
pub(super) const MOST_BYTES: usize = 1024;
/// The longest that either end waits for the other.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

fn new() -> Result<OwnedFd> {
    // Messages arrive whole.
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Bounds how long sends, receives and connects wait.
fn with_patience(socket: OwnedFd) -> Result<OwnedFd> {
    for end in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, end, Some(PATIENCE))?;
    }
    Ok(socket)
}

/// A socket that listens under `name`.
pub(super) fn listening(name: &[u8]) -> Result<OwnedFd> {
    let socket = new()?;
    bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
    listen(&socket, 64)?;
    Ok(socket)
}

/// One end of a connection between two processes of this user.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    /// The other process; 0 if it is not of this PID namespace.
    pub(super) pid: i32,
}

impl Connection {
    fn of_this_user(socket: OwnedFd) -> Result<Self> {
        let other = socket_peercred(&socket)?;
        if other.uid != geteuid() {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                format!("it is another user's (uid {})", other.uid.as_raw()),
            ));
        }
        Ok(Self { socket, pid: Pid::as_raw(Some(other.pid)) })
    }

    /// Waits for the next connection.
    pub(super) fn accepted(listening: &OwnedFd) -> Result<Self> {
        let socket = retried(|| accept_with(listening, SocketFlags::CLOEXEC))?;
        Self::of_this_user(with_patience(socket)?)
    }

    /// Connects to the socket that listens under `name`.
    pub(super) fn to(name: &[u8]) -> Result<Self> {
        let socket = with_patience(new()?)?;
        let address = SocketAddrUnix::new_abstract_name(name)?;
        retried(|| connect(&socket, &address))?;
        Self::of_this_user(socket)
    }

    /// Sends one message, with copies of `files`.
    pub(super) fn send(&self, bytes: &[u8], files: &[impl AsFd]) -> Result<()> {
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let bytes = [IoSlice::new(bytes)];
        retried(|| sendmsg(&self.socket, &bytes, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for the next message, and returns its files and the part of `bytes` that it fills.
    pub(super) fn receive<'b>(&self, bytes: &'b mut [u8]) -> Result<(&'b [u8], Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retried(|| {
            let mut into = [IoSliceMut::new(bytes)];
            recvmsg(&self.socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(files) => Some(files),
            _ => None,
        });
        let files = files.flatten().collect();
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MFILE.into());
        }
        if received.bytes == 0 {
            return Err(Error::new(ErrorKind::UnexpectedEof, "it has closed the connection"));
        }
        Ok((&bytes[..received.bytes], files))
    }
}

/// Makes a call again where a signal came in between.
fn retried<T>(call: impl FnMut() -> rustix::io::Result<T>) -> Result<T> {
    match retry_on_intr(call) {
        // The bound on waiting.
        Err(Errno::AGAIN) => Err(ErrorKind::TimedOut.into()),
        other => Ok(other?),
    }
}

/// Both ends of a connection.
#[cfg(test)]
pub(super) fn pair() -> (Connection, Connection) {
    let flags = SocketFlags::CLOEXEC;
    let ends = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (one, other) = ends.unwrap();
    let end = |socket| Connection { socket, pid: 0 };
    (end(one), end(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    fn files(count: usize) -> Vec<File> {
        (0..count).map(|_| File::open("/dev/null").unwrap()).collect()
    }

    #[test]
    fn messages_arrive_whole_with_their_files() {
        let (one, other) = pair();
        let mut space = [0; MOST_BYTES];
        for count in [0, 1, MOST_FILES] {
            let sent = vec![count as u8 + 1; MOST_BYTES - count];
            one.send(&sent, &files(count)).unwrap();
            one.send(b"next", &files(0)).unwrap();
            let (bytes, received) = other.receive(&mut space).unwrap();
            assert_eq!((bytes, received.len()), (&sent[..], count));
            assert!(received.iter().all(|file| rustix::fs::fstat(file).is_ok()));
            assert_eq!(other.receive(&mut space).unwrap().0, b"next");
        }
    }

    #[test]
    fn the_end_of_the_other_is_an_error_at_once() {
        let (one, other) = pair();
        drop(one);
        let mut space = [0; MOST_BYTES];
        assert_eq!(other.receive(&mut space).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        assert!(other.send(b"a", &files(0)).is_err());
        let refused = Connection::to(b"gruyere-test-nobody-listens").unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_process_of_this_user_may_connect_and_both_ends_are_bounded_in_time() {
        let name = format!("gruyere-test-{}", std::process::id());
        let listening = listening(name.as_bytes()).unwrap();
        let to = Connection::to(name.as_bytes()).unwrap();
        let accepted = Connection::accepted(&listening).unwrap();
        for Connection { socket, pid } in [&to, &accepted] {
            assert_eq!(*pid, std::process::id() as i32);
            for end in [Timeout::Recv, Timeout::Send] {
                let bound = rustix::net::sockopt::socket_timeout(socket, end).unwrap();
                assert_eq!(bound, Some(PATIENCE));
            }
        }
    }
}
