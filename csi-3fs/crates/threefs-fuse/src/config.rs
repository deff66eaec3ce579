//! Daemon configuration, readiness message and errors.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use threefs_client::ClientError;

use crate::claim::ClaimConfig;

/// Configuration of a daemon.
pub struct FuseConfig {
    /// Path of the directory that is the mount's root.
    pub root: String,
    /// Rejects every change.
    pub read_only: bool,
    /// Whether a previous daemon has served the mount.
    pub resume: bool,
    /// Path of the mount journal. Default: none, so that no daemon can take over.
    pub state: Option<PathBuf>,
    /// Timeout of an operation while services do not answer.
    pub timeout: Duration,
    /// The claim that is required to serve the mount, if any.
    pub claim: Option<ClaimConfig>,
    /// Whether the kernel may cache writes and write them back later: only if no other node uses
    /// the files. An fsync or a close still makes them durable.
    pub write_back: bool,
    /// How long the kernel may cache names and attributes; an open always revalidates.
    pub valid: Duration,
    /// Checked at the end, also by a caller that stops the daemon before unmounting.
    pub unanswered: Arc<UnansweredCalls>,
}

/// Operations under a claim whose answer was not seen. Services do not start an operation after the
/// end of the renewal under which it was sent; until then the claim must not move to another node.
#[derive(Debug)]
pub struct UnansweredCalls {
    validity: Option<Duration>,
    at: Mutex<Option<Instant>>,
}

impl UnansweredCalls {
    /// `validity`: validity of a renewal of the mount's claim, if it has one. `resume`: a previous
    /// daemon may have left some.
    pub fn new(validity: Option<Duration>, resume: bool) -> Self {
        Self { validity, at: Mutex::new(resume.then(Instant::now)) }
    }

    pub(crate) fn note(&self) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Checks that every operation was answered, or is too old to be started.
    ///
    /// # Errors
    /// [`FuseError::Unanswered`].
    pub fn check(&self) -> Result<(), FuseError> {
        let at = *self.at.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.validity, at) {
            (Some(validity), Some(at)) if at.elapsed() < validity => {
                Err(FuseError::Unanswered(validity))
            }
            _ => Ok(()),
        }
    }
}

/// Reason why a daemon cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// The descriptor is not of /dev/fuse, or not mounted.
    #[error("descriptor of /dev/fuse: {0}; open it, mount with `fd=N`, then start the daemon")]
    Device(io::Error),
    /// The state file cannot be used.
    #[error("state file: {0}")]
    State(io::Error),
    /// The root cannot be opened.
    #[error("root of the mount: {0}")]
    Root(#[from] ClientError),
    /// The root is not a directory.
    #[error("`{0}` is not a directory; name an existing directory, or create it first")]
    NotADirectory(String),
    /// Another node holds the exclusive claim.
    #[error(
        "the volume is exclusive to one node and in use on node `{holder}`; stop its pods there, or wait until the node is gone"
    )]
    Claimed {
        /// Name of the node.
        holder: String,
    },
    /// The kernel violated the protocol.
    #[error("{0}")]
    Protocol(String),
    /// Unmounted soon after an operation whose caller did not wait for the answer.
    #[error(
        "an operation of the last {} s was not answered and may still start: keep the claim for that long",
        .0.as_secs_f64()
    )]
    Unanswered(Duration),
    /// Unmounted while services did not respond.
    #[error("could not write the last data of {0} files: services did not respond")]
    Unwritten(usize),
    /// Unmounted while the metadata service did not answer.
    #[error("could not report the new length of {0} files: the metadata service did not respond")]
    UnreportedLengths(usize),
}

/// Readiness message, printed once the mount is served.
#[derive(Clone, Debug, Serialize)]
pub struct Ready {
    /// Always true.
    pub ready: bool,
    /// The root's inode.
    pub root: u64,
    /// Number of this daemon among those of the mount, from 1.
    pub generation: u64,
    /// Whether it took over the mount from a previous daemon.
    pub resumed: bool,
    /// Whether the kernel resends the requests that the previous daemon left unanswered. False on
    /// kernels before 6.9: those requests wait until they are interrupted.
    pub resent: bool,
}
