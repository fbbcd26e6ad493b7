//! The descendants of this process.

use std::collections::BTreeSet;

/// A process: its number and start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its process group.
    pub group: libc::pid_t,
    parent: u32,
    start: String,
}

impl Process {
    /// The kernel's facts about an existing process, zombies included.
    pub fn read(pid: u32) -> Option<Process> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // Behind the command in brackets come fields 3 and up: the 4th is the parent, the 5th the
        // group, the 22nd the start.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split(' ').collect();
        let (parent, group) = (fields.get(1)?.parse().ok()?, fields.get(2)?.parse().ok()?);
        Some(Process { pid, group, parent, start: (*fields.get(19)?).to_owned() })
    }

    /// Whether it started at this time; records and the kernel use the same count.
    pub fn started_at(&self, start: &str) -> bool {
        self.start == start
    }

    /// Kills it, if it is still the same process.
    pub fn kill(&self) {
        if Process::read(self.pid).is_some_and(|now| now.start == self.start) {
            // SAFETY: no memory is involved.
            unsafe { libc::kill(self.pid as libc::pid_t, libc::SIGKILL) };
        }
    }

    /// Whether `ancestor` is its parent, or its parent's, and so on.
    pub fn descends_from(&self, ancestor: u32) -> bool {
        let mut parent = self.parent;
        // A pid may be reused during the walk, so the walk has a limit.
        for _ in 0..1000 {
            if parent == ancestor {
                return true;
            }
            match Process::read(parent) {
                Some(process) if process.parent != 0 => parent = process.parent,
                _ => return false,
            }
        }
        false
    }
}

/// Living descendants of `root` whose parents live: in sessions of their own too.
pub fn descendants(root: u32) -> Vec<Process> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut others: Vec<Process> = entries
        .filter_map(|entry| Process::read(entry.file_name().to_str()?.parse().ok()?))
        .collect();
    let (mut found, mut known) = (Vec::new(), BTreeSet::from([root]));
    loop {
        let (new, rest): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|process| known.contains(&process.parent));
        if new.is_empty() {
            return found;
        }
        known.extend(new.iter().map(|process| process.pid));
        found.extend(new);
        others = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_child_s_child_descends_from_us_and_we_from_neither() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 300 & wait"])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let grandchild = loop {
            if let [one] = &descendants(child.id())[..] {
                break one.clone();
            }
            assert!(std::time::Instant::now() < end, "it has no child");
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let us = std::process::id();
        assert!(grandchild.descends_from(us) && grandchild.descends_from(child.id()));
        assert!(!Process::read(us).unwrap().descends_from(child.id()));
        assert!(grandchild.started_at(&grandchild.start) && !grandchild.started_at("0"));
        grandchild.kill();
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
