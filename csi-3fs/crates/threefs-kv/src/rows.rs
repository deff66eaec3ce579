//! Typed rows: postcard values, and errors that name the key.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{KvError, Transaction};

/// Decodes the value of a row.
///
/// # Errors
/// [`KvError::bad_row`] if it is not of this type.
pub fn decode<T: DeserializeOwned>(key: &[u8], value: &[u8]) -> Result<T, KvError> {
    postcard::from_bytes(value).map_err(|error| KvError::bad_row(key, error.to_string()))
}

/// Reads a row, if it exists.
///
/// # Errors
/// As [`decode`], and those of [`Transaction::get`].
pub async fn read<T: DeserializeOwned>(
    txn: &mut Transaction,
    key: &[u8],
) -> Result<Option<T>, KvError> {
    txn.get(key).await?.map(|value| decode(key, &value)).transpose()
}

/// Writes a row.
///
/// # Errors
/// [`KvError::bad_row`] if the value cannot be encoded.
pub fn write<T: Serialize>(txn: &mut Transaction, key: &[u8], value: &T) -> Result<(), KvError> {
    let value = postcard::to_allocvec(value)
        .map_err(|error| KvError::bad_row(key, format!("cannot be encoded: {error}")))?;
    txn.set(key, value);
    Ok(())
}
