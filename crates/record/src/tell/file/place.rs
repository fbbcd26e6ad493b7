//! Resolves a path: the folder of a file, held open, and the file's name in it.
//!
//! The kernel follows links of any owner; in /tmp any user may make them. So each link on the way
//! is checked before it is followed, and the final operation uses the folder found: swapping a part
//! of the path meanwhile changes nothing.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path};

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, PROC_SUPER_MAGIC, fstatfs, mkdirat, openat, readlinkat, renameat,
    unlinkat,
};
use rustix::io::Errno;

use crate::open::effective_user;

/// Links followed per path, as many as in the kernel.
const MOST_LINKS: u32 = 40;
/// Random names tried.
const MOST_NAMES: u32 = 8;

/// A name in a folder, existing or not.
pub(super) struct Place {
    folder: OwnedFd,
    name: OsString,
}

/// The final target of a name.
pub(super) struct Target {
    place: Place,
    /// Metadata of the target, which is no link.
    pub about: Metadata,
    /// The name is one of /proc's links, such as a descriptor's, which only the kernel can follow.
    is_of_proc: bool,
}

impl Place {
    /// Resolves `path` without following its last part.
    ///
    /// # Errors
    /// The system's error; a link on the way is another user's; the last part can only be a folder.
    pub fn of(path: &Path) -> io::Result<Place> {
        Walk { links: 0, makes: false }.place(start(path)?, path)
    }

    /// Metadata of the file here, without following a link; `None`: no file.
    ///
    /// # Errors
    /// The system's error.
    pub fn look(&self) -> io::Result<Option<Metadata>> {
        match open_path(&self.folder, &self.name, OFlags::NOFOLLOW) {
            Ok(there) => Ok(Some(File::from(there).metadata()?)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the file here, which is no link.
    ///
    /// # Errors
    /// The system's error.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.folder, &self.name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// The final target of this name; `None`: no file.
    ///
    /// # Errors
    /// The system's error; a link on the way is another user's.
    pub fn target(&self) -> io::Result<Option<Target>> {
        let mut walk = Walk { links: 0, makes: false };
        let mut place = Place { folder: self.folder.try_clone()?, name: self.name.clone() };
        loop {
            let link = match open_path(&place.folder, &place.name, OFlags::NOFOLLOW) {
                Ok(there) => there,
                Err(Errno::NOENT) => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            let about = File::from(link.try_clone()?).metadata()?;
            if !about.is_symlink() {
                return Ok(Some(Target { place, about, is_of_proc: false }));
            }
            walk.expect_followable(&place.folder, &place.name, &about, true)?;
            if is_of_proc(&link) {
                let there = open_path(&place.folder, &place.name, OFlags::empty())?;
                let about = File::from(there).metadata()?;
                return Ok(Some(Target { place, about, is_of_proc: true }));
            }
            let text = text(&link)?;
            let text = Path::new(&text);
            place = match walk.place(beginning(text, place.folder)?, text) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                found => found?,
            };
        }
    }

    /// Makes a new file in the same folder, under an unguessable name.
    ///
    /// # Errors
    /// The system's error.
    pub fn beside(&self) -> io::Result<Beside<'_>> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mut failed = Errno::EXIST;
        for _ in 0..MOST_NAMES {
            let name = OsString::from(format!(".gruyere-{}.tmp", random_name()));
            let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            match openat(&self.folder, &name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(file) => {
                    let file = file.into();
                    return Ok(Beside { place: self, name, file, has_its_name: false });
                }
                Err(Errno::EXIST) => {}
                Err(error) => {
                    failed = error;
                    break;
                }
            }
        }
        Err(failed.into())
    }
}

impl Target {
    /// Opens it.
    ///
    /// # Errors
    /// The system's error.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        if self.is_of_proc {
            let Place { folder, name } = &self.place;
            return Ok(openat(folder, name, flags | OFlags::CLOEXEC, Mode::empty())?.into());
        }
        self.place.open(flags)
    }
}

/// A file that will take its place's name, or else be removed.
pub(super) struct Beside<'a> {
    place: &'a Place,
    name: OsString,
    file: File,
    has_its_name: bool,
}

impl Beside<'_> {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Takes the name, replacing its file (a link itself, not its target).
    ///
    /// # Errors
    /// The system's error; then the file is removed.
    pub fn take_name(mut self) -> io::Result<()> {
        let folder = &self.place.folder;
        renameat(folder, &self.name, folder, &self.place.name)?;
        self.has_its_name = true;
        Ok(())
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        if !self.has_its_name {
            let _ = unlinkat(&self.place.folder, &self.name, AtFlags::empty());
        }
    }
}

/// An unguessable word.
pub fn random_name() -> String {
    // Its keys are the system's random numbers.
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

/// Makes the folder `path` and its parents, if missing.
///
/// # Errors
/// The system's error; a link on the way is another user's.
pub(super) fn make_folders(path: &Path) -> io::Result<()> {
    Walk { links: 0, makes: true }.folder(start(path)?, path).map(drop)
}

/// State of a path's resolution.
struct Walk {
    /// Links followed.
    links: u32,
    /// Whether to make missing folders.
    makes: bool,
}

impl Walk {
    /// Resolves `path` from `folder`.
    fn place(&mut self, folder: OwnedFd, path: &Path) -> io::Result<Place> {
        let Some(name) = path.file_name() else { return Err(io::ErrorKind::IsADirectory.into()) };
        let outer = path.parent().unwrap_or(Path::new(""));
        Ok(Place { folder: self.folder(folder, outer)?, name: name.to_owned() })
    }

    /// The folder at `path` from `folder`.
    fn folder(&mut self, mut folder: OwnedFd, path: &Path) -> io::Result<OwnedFd> {
        let mut parts = parts(path);
        while let Some(part) = parts.pop_front() {
            // As a folder first: that triggers automounts.
            match open_path(&folder, &part, OFlags::NOFOLLOW | OFlags::DIRECTORY) {
                Ok(next) => {
                    folder = next;
                    continue;
                }
                Err(Errno::NOTDIR | Errno::LOOP) => {}
                Err(Errno::NOENT) if self.makes => {
                    match mkdirat(&folder, &part, Mode::RWXU | Mode::RWXG | Mode::RWXO) {
                        // Another process may have been first.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                    folder = open_path(&folder, &part, OFlags::NOFOLLOW | OFlags::DIRECTORY)?;
                    continue;
                }
                Err(error) => return Err(error.into()),
            }
            let link = open_path(&folder, &part, OFlags::NOFOLLOW)?;
            let about = File::from(link.try_clone()?).metadata()?;
            if !about.is_symlink() {
                return Err(Errno::NOTDIR.into());
            }
            self.expect_followable(&folder, &part, &about, false)?;
            if is_of_proc(&link) {
                folder = open_path(&folder, &part, OFlags::DIRECTORY)?;
                continue;
            }
            let text = text(&link)?;
            let text = Path::new(&text);
            folder = beginning(text, folder)?;
            let mut inner = self::parts(text);
            inner.append(&mut parts);
            parts = inner;
        }
        Ok(folder)
    }

    /// Checks that the link `name` in `folder` may be followed.
    fn expect_followable(
        &mut self,
        folder: &OwnedFd,
        name: &OsStr,
        about: &Metadata,
        is_last: bool,
    ) -> io::Result<()> {
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        let folder = File::from(folder.try_clone()?).metadata()?;
        let user = effective_user();
        if may_follow(about.uid(), &Way { is_last, mode: folder.mode() }, user) {
            return Ok(());
        }
        let (name, owner) = (name.display(), about.uid());
        let reason = format!(
            "{name} is a link that belongs to user {owner}, and this is user {user}: it is not \
             followed; name what it leads to"
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, reason))
    }
}

/// The position of a link.
struct Way {
    /// Whether it is the last part of a path, not a folder on the way.
    is_last: bool,
    /// The mode of its folder.
    mode: u32,
}

/// Whether `user` may follow a link of `owner`. Root's links are the system's. On the way to a
/// file, a user other than root also follows links of others, as teams share folders, but not where
/// any user could have made one.
fn may_follow(owner: u32, at: &Way, user: u32) -> bool {
    let is_everybodys = at.mode & 0o002 != 0;
    owner == user || owner == 0 || (user != 0 && !at.is_last && !is_everybodys)
}

/// The folder to begin in.
fn start(path: &Path) -> io::Result<OwnedFd> {
    let at = if path.has_root() { "/" } else { "." };
    Ok(openat(CWD, at, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// The folder to begin a link's text in; the link is in `folder`.
fn beginning(text: &Path, folder: OwnedFd) -> io::Result<OwnedFd> {
    if text.has_root() { start(text) } else { Ok(folder) }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let is_step =
        |part: &Component<'_>| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().filter(is_step).map(|part| part.as_os_str().to_owned()).collect()
}

fn open_path(folder: &OwnedFd, name: &OsStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat(folder, name, flags | OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// The text of an open link.
fn text(link: &OwnedFd) -> io::Result<OsString> {
    Ok(OsString::from_vec(readlinkat(link, "", Vec::new())?.into_bytes()))
}

fn is_of_proc(link: &OwnedFd) -> bool {
    fstatfs(link).is_ok_and(|about| about.f_type == PROC_SUPER_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TMP: u32 = 0o1777;
    const SHARED: u32 = 0o2775;

    #[test]
    fn links_of_ones_own_and_of_roots_are_followed_everywhere() {
        for user in [0, 1000] {
            for (is_last, mode) in [(false, TMP), (true, TMP), (false, SHARED), (true, SHARED)] {
                let at = Way { is_last, mode };
                assert!(may_follow(user, &at, user) && may_follow(0, &at, user));
            }
        }
    }

    #[test]
    fn root_follows_no_link_of_anothers() {
        for (is_last, mode) in [(false, TMP), (true, TMP), (false, SHARED), (true, SHARED)] {
            assert!(!may_follow(1000, &Way { is_last, mode }, 0));
        }
    }

    #[test]
    fn a_user_follows_links_of_others_only_on_the_way_through_folders_that_are_not_everybodys() {
        let follows = |is_last, mode| may_follow(1001, &Way { is_last, mode }, 1000);
        assert!(follows(false, SHARED));
        assert!(!follows(false, TMP) && !follows(false, 0o777));
        assert!(!follows(true, TMP) && !follows(true, SHARED));
    }

    #[test]
    fn random_names_differ() {
        assert_ne!(random_name(), random_name());
    }
}
