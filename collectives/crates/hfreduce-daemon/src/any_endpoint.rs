//! Endpoints and newcomers, with or without a daemon.

use std::path::Path;
use std::time::Duration;

use super::{DaemonEndpoint, DaemonNewcomer};
use hfreduce_core::error::CollectiveError;
use hfreduce_engine::communicator::Communicator;
use hfreduce_engine::endpoint::{Endpoint, Newcomer, Options};

/// The endpoint of a rank, with or without a daemon.
pub enum AnyEndpoint {
    /// This process has the connections.
    Local(Box<Endpoint>),
    /// A daemon has them.
    Daemon(Box<DaemonEndpoint>),
}

impl AnyEndpoint {
    /// Opens an endpoint, at the daemon that listens at `daemon` if given.
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

    /// The info that the other ranks need.
    pub fn info(&self) -> Vec<u8> {
        match self {
            Self::Local(endpoint) => endpoint.info(),
            Self::Daemon(attachment) => attachment.info(),
        }
    }

    /// Connects to all ranks, given the infos of all ranks in rank order.
    ///
    /// # Errors
    /// The rank that is missing or does not match.
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

/// A newcomer, with or without a daemon.
pub enum AnyNewcomer {
    /// This process has the connections.
    Local(Box<Newcomer>),
    /// A daemon has them.
    Daemon(Box<DaemonNewcomer>),
}

impl AnyNewcomer {
    /// Opens the port of a newcomer. The placement in `options` has one entry, for the newcomer.
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

    /// The info that the members need to accept it.
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
    /// The rank that is missing or does not match.
    pub fn join(&self, timeout: Duration) -> Result<Communicator, CollectiveError> {
        match self {
            Self::Local(newcomer) => newcomer.join(timeout),
            Self::Daemon(applicant) => applicant.join(timeout),
        }
    }
}
