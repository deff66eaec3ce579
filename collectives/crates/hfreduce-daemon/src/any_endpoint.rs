//! Ranks and newcomers before they have a group, in either way to run.

use std::path::Path;
use std::time::Duration;

use super::{DaemonEndpoint, DaemonNewcomer};
use hfreduce_core::error::CollectiveError;
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::endpoint::{Endpoint, Newcomer, Options};

/// A rank before it knows its peers, in either way to run.
pub enum AnyEndpoint {
    /// It has its own connections.
    Local(Box<Endpoint>),
    /// A daemon has them.
    Daemon(Box<DaemonEndpoint>),
}

impl AnyEndpoint {
    /// Opens what the others will connect to, at the daemon behind `daemon` if there is one.
    ///
    /// # Errors
    /// As for [`Endpoint::new`] and [`DaemonEndpoint::open`].
    pub fn open(
        options: Options,
        key: &[u8],
        daemon: Option<&Path>,
    ) -> Result<Self, CollectiveError> {
        Ok(match daemon {
            None => Self::Local(Box::new(Endpoint::new(options, key)?)),
            Some(socket) => Self::Daemon(Box::new(DaemonEndpoint::open(options, key, socket)?)),
        })
    }

    /// What the others need to know.
    pub fn info(&self) -> Vec<u8> {
        match self {
            Self::Local(endpoint) => endpoint.info(),
            Self::Daemon(attachment) => attachment.info(),
        }
    }

    /// Connects to everybody, given what all ranks told, in rank order.
    ///
    /// # Errors
    /// Who is missing or does not fit.
    pub fn connect(
        self,
        infos: &[Vec<u8>],
        timeout: Duration,
    ) -> Result<Communicator, CollectiveError> {
        match self {
            Self::Local(endpoint) => endpoint.connect(infos, timeout),
            Self::Daemon(attachment) => attachment.connect(infos, timeout),
        }
    }
}

/// Somebody who waits to be taken into a group that exists, in either way to run.
pub enum AnyNewcomer {
    /// It has its own connections.
    Local(Box<Newcomer>),
    /// A daemon has them.
    Daemon(Box<DaemonNewcomer>),
}

impl AnyNewcomer {
    /// Opens the port at which the group's members find it. The placement in `options` is its own
    /// place alone.
    ///
    /// # Errors
    /// As for [`Newcomer::new`] and [`DaemonNewcomer::open`].
    pub fn open(
        options: Options,
        key: &[u8],
        daemon: Option<&Path>,
    ) -> Result<Self, CollectiveError> {
        Ok(match daemon {
            None => Self::Local(Box::new(Newcomer::new(options, key)?)),
            Some(socket) => Self::Daemon(Box::new(DaemonNewcomer::open(options, key, socket)?)),
        })
    }

    /// What the members need to know to take it in.
    pub fn info(&self) -> Vec<u8> {
        match self {
            Self::Local(newcomer) => newcomer.info(),
            Self::Daemon(applicant) => applicant.info(),
        }
    }

    /// Waits until a member's `reconfigure` names it, and connects. May be called again after an
    /// error.
    ///
    /// # Errors
    /// Who is missing or does not fit.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        match self {
            Self::Local(newcomer) => newcomer.join(timeout),
            Self::Daemon(applicant) => applicant.join(timeout),
        }
    }
}
