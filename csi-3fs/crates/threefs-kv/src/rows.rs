//! Rows as values of a type: postcard, and an error that names the row's key.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{KvError, Transaction};

/// A row's value.
///
/// # Errors
/// [`KvError::bad_row`] where it is none of this type.
pub fn decode<T: DeserializeOwned>(key: &[u8], value: &[u8]) -> Result<T, KvError> {
    postcard::from_bytes(value).map_err(|error| KvError::bad_row(key, error.to_string()))
}

/// The row, if there is one.
///
/// # Errors
/// As [`decode`], and those of [`Transaction::get`].
pub async fn read<T: DeserializeOwned>(
    txn: &mut Transaction,
    key: &[u8],
) -> Result<Option<T>, KvError> {
    txn.get(key).await?.map(|value| decode(key, &value)).transpose()
}

/// Puts the row.
///
/// # Errors
/// [`KvError::bad_row`] where the value cannot be said.
pub fn write<T: Serialize>(txn: &mut Transaction, key: &[u8], value: &T) -> Result<(), KvError> {
    let value = postcard::to_allocvec(value)
        .map_err(|error| KvError::bad_row(key, format!("cannot be encoded: {error}")))?;
    txn.set(key, value);
    Ok(())
}
