//! Addresses of services: one, or a list.

use pyo3::FromPyObject;
use serde::Deserialize;

/// An address (`host:port`) or a list of them.
#[derive(Deserialize, FromPyObject)]
#[serde(untagged)]
pub enum Addresses {
    /// One address, as in files of earlier releases.
    One(String),
    /// All addresses.
    List(Vec<String>),
}

impl From<Addresses> for Vec<String> {
    fn from(addresses: Addresses) -> Self {
        match addresses {
            Addresses::One(address) => vec![address],
            Addresses::List(addresses) => addresses,
        }
    }
}
