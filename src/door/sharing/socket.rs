//! Messages with open files between processes of one user, over abstract Unix sockets.
//!
//! A name of an abstract socket is no file: it is gone with the process. Every process of the
//! network namespace may connect, so both ends ask the kernel who the other is.

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};
use rustix::process::geteuid;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Files in one message, at most: few enough for a process that has few left.
pub(super) const MOST_FILES: usize = 32;
/// Bytes in one message, at most.
pub(super) const MOST_BYTES: usize = 1024;
/// The longest that either end waits for the other.
const PATIENCE: Duration = Duration::from_secs(60);

fn new() -> Result<OwnedFd> {
    // Messages arrive whole.
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
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
pub(super) struct Connection(OwnedFd);

impl Connection {
    fn of_this_user(socket: OwnedFd) -> Result<Self> {
        if socket_peercred(&socket)?.uid != geteuid() {
            return Err(Error::new(ErrorKind::PermissionDenied, "it is another user's"));
        }
        for end in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, end, Some(PATIENCE))?;
        }
        Ok(Self(socket))
    }

    /// Waits for the next connection.
    pub(super) fn accepted(listening: &OwnedFd) -> Result<Self> {
        Self::of_this_user(retried(|| accept_with(listening, SocketFlags::CLOEXEC))?)
    }

    /// Connects to the socket that listens under `name`.
    pub(super) fn to(name: &[u8]) -> Result<Self> {
        let socket = new()?;
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
        retried(|| sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Waits for the next message, and returns its files and the part of `bytes` that it fills.
    pub(super) fn receive<'b>(&self, bytes: &'b mut [u8]) -> Result<(&'b [u8], Vec<OwnedFd>)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retried(|| {
            let mut into = [IoSliceMut::new(bytes)];
            recvmsg(&self.0, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)
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

fn retried<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                return Err(Error::new(ErrorKind::TimedOut, "it has not answered for a minute"));
            }
            other => return Ok(other?),
        }
    }
}
